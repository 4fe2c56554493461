"""The table of backbones: counts against closed forms and published numbers, and the files that the program writes."""

import json
from pathlib import Path

import pytest

from backbones import list_backbones
from scripts.benchmark import backbones, kit

ROOT = Path(__file__).parent.parent


def _multiply_adds(num_blocks: tuple[int, ...]) -> int:
    """Return the multiply-adds of an IResNet at 112 x 112 and D = 512, layer by layer."""
    total, inside, side = 112 * 112 * 64 * 3 * 9, 64, 112
    for channels, depth in zip((64, 128, 256, 512), num_blocks, strict=True):
        total += side**2 * channels * inside * 9 + (side // 2) ** 2 * channels * (channels * 9 + inside)
        side //= 2
        total += (depth - 1) * 2 * side**2 * channels**2 * 9
        inside = channels
    return total + 512 * 7 * 7 * 512


def test_counts_are_those_of_the_layers(tmp_path: Path):
    file = tmp_path / "counts.json"
    assert backbones.main(["--no-times", "--largest", "1", "--names", "r18", "mbf", "--json", str(file)]) == 0
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["r18"]["multiply_adds"] == _multiply_adds((2, 2, 2, 2))
    # arcface_torch says 0.45 G; its counter adds normalisations and activations
    assert rows["mbf"]["multiply_adds"] == pytest.approx(0.45e9, rel=0.05)
    assert {row["kept_bytes_per_image"] for row in rows.values()} == {None}  # of more than a million parameters


def test_transformers_have_the_published_multiply_adds(tmp_path: Path):
    """InsightFace's table of vision transformers says 1.5, 5.7, 11.4 and 25.3 G; that of KP-RPE by its 196 tokens of 512."""
    file, names = tmp_path / "counts.json", ["vit_t", "vit_s", "vit_b", "vit_l", "vit_kprpe_s"]
    assert backbones.main(["--no-times", "--largest", "1", "--names", *names, "--json", str(file)]) == 0
    keypoints = 12 * 196 * (14 * 512**2 + 2 * 196 * 512 + 196 * 8 * 11) + 196 * 512 * (192 + 512)
    found = [row["multiply_adds"] / 1e9 for row in json.loads(file.read_text())["rows"]]
    assert found == pytest.approx([1.5, 5.7, 11.4, 25.3, keypoints / 1e9], rel=0.01)


def test_two_networks_are_measured_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page, file = tmp_path / "page.md", tmp_path / "rows.json"
    page.write_text(f"Before\n\n{backbones.BEGIN}\n\nold\n\n{kit.END}\n\nAfter\n")
    arguments = ["--quick", "--device", "cpu", "--embedding-size", "16", "--image-size", "64", "--page", str(page)]
    assert backbones.main([*arguments, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert [row["name"] for row in found["rows"]] == ["r18", "mbf"]
    for row in found["rows"]:
        for name, spread in (("ms_per_image", "ms_range"), ("ratio", "ratio_range")):
            assert 0 < row[spread][0] <= row[name] <= row[spread][1]
        assert row["kept_bytes_per_image"] > 4 * 16 * 64 * 64  # the output of the first layer alone, in fp32
    text = page.read_text()
    assert text.startswith("Before") and text.endswith("After\n") and "old" not in text
    assert "images of 64 x 64, fp32, 2 images a step" in text and "| mbf | " in text
    assert (tmp_path / "images" / "backbones.png").read_bytes()[:4] == b"\x89PNG"
    assert "r18" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--names", "r51"], "--names, --width, --embedding-size, --image-size: name must be one of r18"),
        (["--image-size", "100"], "image_size must be a multiple of 16"),
        (["--quick", "--names", "mbf", "--no-times", "--page", "PAGE"], "--page: "),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "page.md").write_text("no lines for a table\n")
    assert backbones.main([text.replace("PAGE", str(tmp_path / "page.md")) for text in arguments]) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_the_page_has_the_cost_of_every_backbone():
    page = (ROOT / "docs" / "backbones.md").read_text()
    table = page.split(backbones.BEGIN)[1].split(kit.END)[0]
    assert [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| ")][2:] == list_backbones()
