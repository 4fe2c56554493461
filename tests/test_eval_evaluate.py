"""Embedding over ranks, the evaluation of sets, and the reports."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from pictures import jpeg, picture
from saving import ALONE, save_now
from test_eval_main import _write_set
from tiny_runs import SHALLOW, error_of
from torch import nn

from backbones import build_backbone
from eval import embed
from eval.__main__ import main
from eval.embed import EmbedSettings, class_means, embed_images
from eval.monitor import evaluate, load_pair_sets, selection_score
from eval.pair_sets.bin_file import PairSet
from eval.protocol import Embed
from eval.report import draw_overview, format_table, write_report
from eval.verification import fuse_views, roc_curve, verify
from utils.distributed import World
from utils.image import normalise

SIZE = 48


def _model(size: int = SIZE) -> nn.Module:
    torch.manual_seed(0)
    model = SHALLOW["shallow"](16, 0.125, image_size=size)
    model.train().apply(lambda module: setattr(module, "momentum", 1.0))
    with torch.no_grad():
        model(torch.randn(8, 3, size, size))  # statistics that are not the initial ones
    return model


class InFloat64(nn.Module):
    """A network that computes in float64, where the order of sums shows in no digit of float32: processors differ in it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.double()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images.double())


def _decode(number: int) -> np.ndarray:
    return cv2.cvtColor(cv2.imdecode(np.frombuffer(jpeg(picture(number, SIZE)), np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)


def _slow_embeddings(model: nn.Module, num_images: int) -> tuple[np.ndarray, np.ndarray]:
    """One image at a time through a float64 network, the mirror image by numpy."""
    model.eval()
    plain, mirrored = [], []
    with torch.no_grad():
        for number in range(num_images):
            for rows, pixels in ((plain, _decode(number)), (mirrored, _decode(number)[:, ::-1].copy())):
                rows.append(model(normalise(torch.from_numpy(pixels)[None]).double())[0].numpy())
    return np.array(plain), np.array(mirrored)


def _check_embeddings(rank: int, world_size: int, counts: list[int]) -> None:
    world = World(rank, world_size, rank, world_size, torch.device("cpu"))
    for num_images in counts:
        model = _model()
        model.layers[1].eval()
        modes = [module.training for module in model.modules()]
        found = embed_images(network := InFloat64(model), _decode, num_images, world, EmbedSettings(3, image_size=SIZE))
        assert modes == [module.training for module in model.modules()]
        for view, slow in zip(
            found, _slow_embeddings(model, num_images), strict=True
        ):  # embed_images returns float32: one rounding
            np.testing.assert_allclose(view, slow, rtol=2**-24 * 1.001, atol=1e-12)
    if world_size > 1:
        with pytest.raises(ValueError, match="image 1 is broken"):
            embed_images(network, _broken, num_images, world)


def test_a_rank_without_an_image_knows_the_size_of_embeddings_of_any_input():
    model = build_backbone("r18", 16, 0.125, image_size=48)
    assert embed_images(model, _broken, 0, ALONE, EmbedSettings(image_size=48))[0].shape == (0, 16)


def _broken(number: int) -> np.ndarray:
    if number == 1:
        raise ValueError("image 1 is broken")
    return _decode(number)


@pytest.mark.numeric
@pytest.mark.parametrize(("world_size", "counts"), [(1, [8]), (2, [7]), (3, [7, 2])])
def test_ranks_share_the_images_and_give_what_one_image_at_a_time_gives(
    run_ranks: Callable[..., None], world_size: int, counts: list[int]
):
    run_ranks(_check_embeddings, world_size, counts)


def test_where_shapes_must_be_constant_they_are_and_no_number_changes(monkeypatch: pytest.MonkeyPatch):
    """As on CUDA; 7 images in batches of 3, and means over 7 images of 2 classes."""
    model, shapes = InFloat64(_model()), []
    model.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape)))
    labels, classes, settings = np.array([0, 1, 0, 1, 0, 1, 0]), np.array([1, 0]), EmbedSettings(3, image_size=SIZE)

    def compute() -> list[np.ndarray]:
        means, found = class_means(model, lambda n: (_decode(n), labels[n]), labels, classes, 9, ALONE.device, settings)
        return [*embed_images(model, _decode, 7, ALONE, settings), means.numpy(), found]

    expected = compute()
    assert (2 * 1, 3, SIZE, SIZE) in shapes  # as it is, the last batch is smaller
    shapes.clear()
    monkeypatch.setattr(embed, "_wants_constant_shapes", lambda device: True)
    padded = compute()
    assert all(np.array_equal(*pair) for pair in zip(expected, padded, strict=True))
    assert {shape for shape in shapes if shape[0] > 1} == {(6, 3, SIZE, SIZE), (3, 3, SIZE, SIZE)}  # 1: asks for the size


def test_identical_images_score_perfectly_and_every_report_holds_the_numbers(tmp_path: Path):
    _write_set(tmp_path / "twins.bin", 20)
    sets = load_pair_sets(tmp_path, ["twins"], "eval.targets", "eval.path")
    results = dict(evaluate(Embed(_model(112), ALONE, EmbedSettings(16)), sets))
    assert results["twins"].accuracy == 1.0
    table = format_table(results)
    # 10 impostor pairs cannot carry FAR 1e-3
    assert "twins" in table and "cosine threshold" in table and "100.00 +- 0.00" in table and "n/a" in table
    assert format_table(results, markdown=True).splitlines()[1].count("---") == 9
    assert json.loads(json.dumps(results["twins"].as_json()))["num_genuine"] == 10
    (tmp_path / "figure.png").write_bytes(draw_overview(results, "twins"))
    figure = cv2.imread(str(tmp_path / "figure.png"))
    assert figure is not None and len(np.unique(figure.reshape(-1, 3), axis=0)) > 50


def test_roc_curve_is_that_of_a_loop_over_thresholds():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2, 40, 4))
    rows /= np.linalg.norm(rows, axis=2, keepdims=True)
    result = verify(rows[0], rows[1], rng.random(40) < 0.5, xnorm=1.0)
    far, tar = roc_curve(result)
    thresholds = np.append(-1.0, np.sort(result.distances))
    assert far.tolist() == [np.mean(result.distances[~result.same] <= t) for t in thresholds]
    assert tar.tolist() == [np.mean(result.distances[result.same] <= t) for t in thresholds]


def test_a_network_that_gives_nan_is_an_error_that_names_the_set():
    images = [jpeg(picture(number)) for number in range(2)]
    pairs = PairSet("bad", images, np.zeros(20, np.int64), np.ones(20, np.int64), np.arange(20) % 2 == 0)
    model = _model(112)
    next(model.parameters()).data.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"evaluation of bad: .*NaN"):
        list(evaluate(Embed(model, ALONE, EmbedSettings(8)), [pairs]))


@pytest.mark.usefixtures("blank")
def test_the_program_takes_runs_checkpoints_and_bare_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _write_set(tmp_path / "twins.bin", 20)
    model = _model(112)
    torch.save(model.state_dict(), tmp_path / "backbone.pth")
    config = {"backbone": {"name": "shallow", "embedding_size": 16, "width": 0.125}, "eval": {"targets": ["twins"], "path": ""},
              "data": {"path": str(tmp_path)}}  # fmt: skip
    rows = {"centres": torch.ones(2, 16)}
    checkpoint = save_now(tmp_path, 3, model.state_dict(), rows, (0, 2), {}, {"config": config, "score": 1.0})
    weights, report = str(tmp_path / "backbone.pth"), ["--report", str(tmp_path / "out")]
    bare = ["--backbone=shallow", "--embedding-size=16", "--width=0.125", "--targets", "twins", "--data", str(tmp_path)]
    tables = []
    for arguments in ([str(tmp_path), *report], [str(tmp_path), "--best"], [str(checkpoint)], [weights, *bare]):
        assert main([*arguments, "--device", "cpu"]) == 0
        tables.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("twins")])
    assert tables[0] and all(table == tables[0] for table in tables)
    _check_report(tmp_path / "out")
    for arguments, message in [
        ([str(tmp_path / "nothing")], "no run folder"),
        ([weights], "--backbone"),
        ([weights, *bare, "--width", "0.5"], "layers.0.layers.0.weight is"),
        ([str(tmp_path), "--targets", "nothing"], "nothing.bin"),
    ]:
        assert message in error_of(main([*arguments, "--device", "cpu"]), capsys)


def _check_report(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    assert "twins" in page and "Which threshold to use" in page and "<script" not in page
    pictures = sorted(path.stem for path in folder.glob("*.png"))
    assert {"curves", "folds", "norms", "similarities", "verification"} <= set(pictures)
    assert page.count("data:image/png;base64,") == len(pictures) - 1  # the overview is for other pages
    found = json.loads((folder / "results.json").read_text())["twins"]
    low, high = found["intervals_95"]["accuracy"]
    assert low <= found["accuracy"] <= high and len(found["operating_points"]) == 6
    drawn = found["similarities"]  # every pair is in one interval
    assert len(drawn["cosine"]) == len(drawn["genuine"]) + 1 == len(drawn["impostor"]) + 1
    assert (sum(drawn["genuine"]), sum(drawn["impostor"])) == (found["num_genuine"], found["num_impostor"])


def test_a_browser_shows_the_report_without_errors(tmp_path: Path):
    """Opens the page in a headless Chromium: the tables and all pictures are there, and it has no script to go wrong."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium here; `apt-get install chromium` brings it")
    rng = np.random.default_rng(0)
    images = [cv2.imencode(".png", rng.integers(0, 256, (112, 112, 3), dtype=np.uint8))[1].tobytes() for _ in range(40)]
    pair_set = PairSet("noise", images, np.arange(0, 40, 2), np.arange(1, 40, 2), np.arange(20) % 2 == 0)
    plain = rng.normal(size=(40, 8)).astype(np.float32)
    write_report(tmp_path, "a title with <brackets> & signs", {"noise": pair_set.verify_views(plain, plain)}, [pair_set])
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    page = (tmp_path / "report.html").as_uri()
    done = subprocess.run([*command, "--dump-dom", page], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    dom = done.stdout
    assert "a title with &lt;brackets&gt; &amp; signs" in dom
    assert dom.count("<table") == 2 and dom.count("<li><a href=") == dom.count("<h2 id=")
    assert dom.count("<img") == len(list(tmp_path.glob("*.png"))) - 1 >= 5
    assert "CONSOLE" not in done.stderr and "Uncaught" not in done.stderr
    subprocess.run(
        [*command, f"--screenshot={tmp_path / 'shot.png'}", "--window-size=1100,1600", page], check=True, timeout=120
    )
    shot = cv2.imread(str(tmp_path / "shot.png"))
    assert shot.shape == (1600, 1100, 3) and shot.std() > 20  # something is drawn


def test_checkpoints_are_chosen_by_the_mean_over_the_sets_of_the_metric_asked_for():
    rng = np.random.default_rng(0)
    same = np.arange(400) % 2 == 0
    first = fuse_views(rng.normal(size=(400, 8)), rng.normal(size=(400, 8)))
    results = {}
    for name, noise in (("one", 0.3), ("two", 0.6)):
        second = fuse_views(np.where(same[:, None], first, rng.normal(size=(400, 8))), noise * rng.normal(size=(400, 8)))
        results[name] = verify(first, second, same, xnorm=1.0)
    one, two = results.values()
    assert one.accuracy > two.accuracy and one.eer < two.eer and one.tar_at_far["1e-2"] > two.tar_at_far["1e-2"]
    assert selection_score(results, "accuracy") == pytest.approx((one.accuracy + two.accuracy) / 2)
    assert selection_score(results, "eer") == pytest.approx(-(one.eer + two.eer) / 2)
    assert selection_score(results, "auc") == pytest.approx((one.auc + two.auc) / 2)
    assert selection_score(results, "tar@1e-2") == pytest.approx((one.tar_at_far["1e-2"] + two.tar_at_far["1e-2"]) / 2)
    with pytest.raises(ValueError, match="cannot be measured"):
        selection_score(results, "tar@1e-3")


@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # of what tests before this one left to the garbage collector
@pytest.mark.parametrize("kind", ["all genuine", "all impostor", "zeros", "all alike", "perfect"])
def test_odd_sets_get_a_report_too(tmp_path: Path, kind: str):
    rng = np.random.default_rng(0)
    images = [cv2.imencode(".png", rng.integers(0, 256, (112, 112, 3), dtype=np.uint8))[1].tobytes() for _ in range(8)]
    same = {"all genuine": np.ones(12, bool), "all impostor": np.zeros(12, bool)}.get(kind, np.arange(12) % 2 == 0)
    first = np.arange(12) % 8
    second = np.where(same, first, (first + 1) % 8)
    embeddings = {"zeros": np.zeros((8, 4)), "all alike": np.ones((8, 4)), "perfect": np.eye(8)}.get(
        kind, rng.normal(size=(8, 4))
    )
    pair_set = PairSet("odd", images, first, second, same)
    plain = embeddings.astype(np.float32)
    result = pair_set.verify_views(plain, plain)
    write_report(tmp_path, kind, {"odd": result}, [pair_set])
    json.loads((tmp_path / "results.json").read_text())
    assert ("not measurable" in (tmp_path / "report.html").read_text()) and (kind != "perfect" or result.accuracy == 1.0)
