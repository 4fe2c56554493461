"""`face quality`: measures of a table and of other programs' files, on planted quality."""

import argparse
import base64
import itertools
import json
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
from pictures import jpeg, picture

from analysis.all_pairs import NUM_BINS
from deploy.gallery.gate import add_gate_arguments, gate_of
from eval.embedding_table import read_table
from scripts import face

NAMES = [f"p{person}/{number}.jpg" for person in range(30) for number in range(4)]


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """Return a folder with a table of 30 people, a fifth of whose pictures is noisy, short and padded."""
    rng = np.random.default_rng(0)
    poor = rng.random(120) < 0.2
    noise = np.round(np.where(poor, 1 + 2 * rng.random(120), 0.2 + 0.2 * rng.random(120)), 3)
    vectors = np.repeat(rng.normal(size=(30, 24)), 4, axis=0) + rng.normal(size=(120, 24)) * noise[:, None]
    np.save(tmp_path / "t.npy", (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32))
    lines = ["name,face,person,norm,padding,score"]
    components = "Filename;UnifiedQualityScore;Sharpness;UnifiedQualityScore.scalar;Sharpness.scalar;assessment_time_in_ms;"
    ofiq = [components]  # its first line ends in a semicolon, the others do not
    for row, name in enumerate(NAMES):
        norm, padding = 20 - 4 * noise[row], noise[row] / 10
        score = "" if row < 7 else f"{rng.random():.4f}"
        lines.append(f"{name},0,{name[:-6]},{norm:.6g},{padding:.4f},{score}")
        value = (0.0, -1) if row == 5 else (20.0 - 4 * poor[row], 80 - 50 * int(poor[row]))
        ofiq.append(f"/data/people/{name};{value[0]:.6f};{row}.5;{value[1]};{row % 100};35")
    ofiq[9] = f"/data/people/{NAMES[8]};;"  # as OFIQ writes a picture that it could not read
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "ofiq.csv").write_text("\n".join(ofiq[:-1]) + "\n")  # OFIQ has not seen the last picture
    for row, name in enumerate(NAMES):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_bytes(jpeg(picture(row, 64 if row % 2 else 112)))
    return tmp_path


def _run(*words: object) -> int:
    return face.main(["quality", *map(str, words)])


def test_measures_are_compared_and_the_gates_are_those_of_enrolment(there: Path, capsys: pytest.CaptureFixture[str]):
    out, columns = there / "out", ["score", "norm", "padding", "UnifiedQualityScore", "UnifiedQualityScore.scalar"]
    words = [there / "t.npy", "--far", "0.01", "--discard", "0.25", "--from", there / "ofiq.csv", "--out", out]
    assert _run(*words, "--pictures", there / "set", "--columns", *columns) == 0
    said, results = capsys.readouterr().out, json.loads((out / "results.json").read_text())
    assert {file.name for file in out.iterdir()} == {"report.html", "results.json", "results.csv", "quality.png"}
    # FNMR is that of all genuine pairs, at the threshold of all impostor pairs
    faces = read_table(there / "t.npy")
    labels, _ = faces.labels()
    cosines = faces.vectors.astype(float) @ faces.vectors.T.astype(float)
    pairs = [(a, b, cosines[a, b]) for a, b in itertools.combinations(range(120), 2)]
    impostor = sorted((cosine for a, b, cosine in pairs if labels[a] != labels[b]), reverse=True)
    limit = impostor[int(0.01 * len(impostor))]  # as many are above it as the FAR allows
    genuine = [(a, b, cosine <= limit + 2 / NUM_BINS) for a, b, cosine in pairs if labels[a] == labels[b]]
    assert not any(limit - 1e-6 < cosine <= limit + 2 / NUM_BINS for a, b, cosine in pairs if labels[a] == labels[b])
    assert results["norm"]["fnmr"] == pytest.approx(np.mean([wrong for *_, wrong in genuine]))
    # padding and norm say the same thing, and score nothing; what OFIQ failed on or lacks is counted
    assert results["norm"]["gain"] > 0.3 > abs(results["score"]["gain"])
    assert results["padding"]["gain"] == results["norm"]["gain"]
    assert {name: results[name]["pictures"] for name in columns} == dict(zip(columns, (113, 120, 120, 117, 117), strict=True))
    assert results["UnifiedQualityScore"]["mean_fnmr"] == results["UnifiedQualityScore.scalar"]["mean_fnmr"]
    assert any(line.split()[:3] == ["score", "113", "7"] for line in said.splitlines())
    # what is printed is what face enrol and face serve parse, and refuses the pictures that the curve discards
    parser = argparse.ArgumentParser()
    add_gate_arguments(parser)
    for name in ("norm", "padding"):
        (line,) = (line for line in said.splitlines() if line.startswith(name) and " --m" in line)
        gate, found = gate_of(parser.parse_args(line.split()[1:3])), results[name]["gate"]
        kept = [not gate.reason(*pair) for pair in zip(faces.norms, faces.qualities["padding"], strict=True)]
        left = [wrong for a, b, wrong in genuine if kept[a] and kept[b]]
        assert 0 < 1 - np.mean(kept) == pytest.approx(found["pictures"]) and found["pictures"] <= 0.25
        assert 1 - len(left) / len(genuine) == pytest.approx(found["comparisons"])
        assert found["after"] == pytest.approx(np.mean(left)) and np.mean(left) < results[name]["fnmr"] / 2
    (line,) = (line for line in said.splitlines() if line.split()[:2] == ["score", "--min-score"])
    assert float(line.split()[2]) == results["score"]["gate"]["limit"]
    page = (out / "report.html").read_text()
    assert all(f"Pictures: {name}" in page for name in columns)
    for found in re.findall('data:image/png;base64,([^"]+)', page)[1:]:  # pictures of any size are shown
        drawn = cv2.imdecode(np.frombuffer(base64.b64decode(found), np.uint8), cv2.IMREAD_COLOR)
        assert (drawn.min(axis=2) < 250).mean() > 0.6
    head, *rows = (out / "results.csv").read_text().splitlines()
    assert head.split(",") == ["discarded", *columns] and len(rows) == 100
    assert float(rows[0].split(",")[2]) == pytest.approx(results["norm"]["fnmr"], 1e-5)
    assert _run(*words) == 1 and "exists already" in capsys.readouterr().err
    assert _run(*words, "--again") == 0 and json.loads((out / "results.json").read_text()) == {"norm": results["norm"]}


def test_a_parquet_table_gives_the_same(there: Path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    faces = read_table(there / "t.npy")
    score = [None if np.isnan(value) else value for value in faces.qualities["score"].tolist()]  # as face embed writes it
    columns = {"name": faces.names, "face": faces.numbers, "person": faces.people, "norm": faces.norms, **faces.qualities}
    vectors = arrow.FixedSizeListArray.from_arrays(arrow.array(np.array(faces.vectors).ravel()), 24)
    parquet.write_table(arrow.table({**columns, "score": score, "embedding": vectors}), there / "p.parquet")
    for table in ("t.npy", "p.parquet"):
        assert _run(there / table, "--far", "0.01", "--columns", "norm", "padding", "score", "--out", there / table[0]) == 0
    assert (there / "t" / "results.json").read_text() == (there / "p" / "results.json").read_text()


def test_values_of_other_files_are_joined_by_name_and_never_guessed(there: Path, capsys: pytest.CaptureFixture[str]):
    path, out = there / "q.csv", there / "out"
    words = (there / "t.npy", "--far", "0.01", "--columns", "blur", "--lower", "blur", "--from", path, "--out", out, "--again")
    rows = [f".\\set\\{name},{row}" for row, name in enumerate(NAMES)]
    path.write_text("name,blur\n\n" + "\n".join(reversed(rows)).replace("/", "\\") + "\nnobody/0.jpg,\n")
    assert _run(*words) == 0
    gate = json.loads((out / "results.json").read_text())["blur"]["gate"]
    assert gate["limit"] == 113 and gate["pictures"] == pytest.approx(6 / 120)
    said = capsys.readouterr().out
    assert "at most 113" in said
    assert _run(*words[:5], *words[7:]) == 0 and "at least 6" in capsys.readouterr().out  # higher is better
    for text, reason in (
        ("name,blur\n0.jpg,1\n", "q.csv: has no picture of the table, whose names are such as 'p0/0.jpg'"),
        ("name,blur\na/p0/0.jpg,1\nb/p0/0.jpg,2\n", "q.csv: rows 2 and 3 are both of p0/0.jpg"),
        ("name,blur\np0/0.jpg,sharp\n", "q.csv: row 2: blur must be a number, got 'sharp'"),
        ("name,blur\np0/0.jpg\n", "q.csv: row 2 has 1 columns, the first line 2"),
        ("name,blur\np0/0.jpg,1\n", "--columns: blur: no two pictures of one person have it"),
        ("name,blurr\np0/0.jpg,1\n", "--columns: no blur. Did you mean blurr?"),
        ("id,blur\np0/0.jpg,1\n", "q.csv: needs a column name or Filename; it has id, blur"),
        ("", "q.csv: needs a column name"),
    ):
        path.write_text(text)
        assert _run(*words) == 1 and reason in capsys.readouterr().err, reason
    with pytest.raises(SystemExit):
        _run(*words[:2], "0", *words[3:])
    assert "--far: must be a rate such as 1e-3 from 1e-12 to 0.999, got 0" in capsys.readouterr().err
    assert _run(*words[:2], "1e-9", *words[-3:]) == 1 and "impostor pairs is less than one" in capsys.readouterr().err
