r"""Names that attack: what a file or a person is called reaches terminals, logs, Markdown and pictures as the text it is."""

import html
import re
import shutil
from pathlib import Path

import cv2
import markdown
import numpy as np
import pytest
from test_eval_main import CPU, _network, _write_set
from tiny_runs import error_of, tiny_run, write_dataset

import train
from eval import __main__ as eval_program
from scripts.data import verify as verify_data
from scripts.eval import compare_runs
from utils.text import markdown_table, markdown_text, printable

NAME = "a|b _c_ *d* `e` [f](g) ~~h~~ $\\bad{$ <img src=x>&amp;\n# i\x1b]0;j\x07\u202e"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


def _cells(text: str) -> list[list[str]]:
    """Return the rows of the first table that an independent reader of Markdown sees, as the text it shows."""
    page = markdown.markdown(text, extensions=["tables"])
    table = page[page.index("<table>") : page.index("</table>")]
    rows = re.findall(r"<tr>(.*?)</tr>", table, re.S)
    return [[html.unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S)] for row in rows]


@pytest.mark.parametrize("seed", range(20))
def test_a_reader_of_markdown_shows_each_cell_as_the_text_it_is(seed: int):
    rng = np.random.default_rng(seed)
    signs = [*"ab1 _*`[]()<>&|\\~#+-!.:$\"'\n\t\x1b\x9b\u202e\u00e9", "&lt;", "http://x.y"]
    drawn = [["".join(rng.choice(signs, int(rng.integers(1, 12)))) for _ in range(3)] for _ in range(4)]
    rows = [["x" + cell + "x" for cell in row] for row in drawn]
    assert _cells(markdown_table(rows)) == [[printable(cell) for cell in row] for row in rows]


def test_a_paragraph_is_the_text_it_is():
    for text in ("1. January", "20) x", "# x", "- x", "+ x", "2.5 %", "===", "<b> & *x*", "1."):
        shown = markdown.markdown(markdown_text(text))
        assert shown == f"<p>{html.escape(text, quote=False)}</p>"
    assert "$" not in markdown_text("$x$")  # GitHub draws a formula


def test_a_set_and_a_run_of_any_name_are_one_row_each_in_every_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _write_set(tmp_path / "twins.bin")
    shutil.copy(tmp_path / "twins.bin", tmp_path / f"{NAME}.bin")
    out = tmp_path / f"out{NAME}"
    targets = ["--targets", str(tmp_path / f"{NAME}.bin"), "twins", "--data", str(tmp_path)]
    assert eval_program.main([_network(tmp_path / "net.onnx")[0], *targets, *CPU, "--report", str(out)]) == 0
    shown = capsys.readouterr()
    assert not CONTROL.search(shown.out + shown.err.replace("\r", "")) and printable(NAME) in shown.out  # of progress bars
    rows = _cells((out / "results.md").read_text())
    assert [row[0] for row in rows[1:]] == [printable(NAME), "twins"] and len({len(row) for row in rows}) == 1
    assert "<img src=x>" not in (out / "report.html").read_text()
    assert compare_runs.main([str(out), str(out), "--out", str(tmp_path / "comparison")]) == 0
    assert not CONTROL.search(capsys.readouterr().out)
    rows = _cells((tmp_path / "comparison" / "comparison.md").read_text())
    assert f"{printable(NAME)}: accuracy %" in [row[0] for row in rows] and len({len(row) for row in rows}) == 1


def test_a_name_cannot_write_to_the_terminal_or_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / f"set{NAME}"
    write_dataset(folder)
    assert verify_data.main([str(folder)]) == 0
    shown = capsys.readouterr()
    assert not CONTROL.search(shown.out) and printable(NAME) in shown.out
    said = error_of(verify_data.main([str(tmp_path / f"none{NAME}")]), capsys)
    assert printable(NAME) in said and not CONTROL.search(said)
    people = tmp_path / "people"
    for number in range(8):
        (people / f"p{number % 2}").mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(people / f"p{number % 2}" / f"{number}.png"), np.full((112, 112, 3), 30 * number, np.uint8))
    (people / "p0" / f"{NAME}.png").write_bytes(b"no picture")
    skip = ["data.source=folder", "data.on_bad_record=skip", "data.max_bad_fraction=0.5", "eval.targets=[]"]
    assert train.main(tiny_run(people, tmp_path, *skip, "train.epochs=2")) == 0
    log = (tmp_path / "tiny" / "train.log").read_text()
    assert printable(NAME) in log and not CONTROL.search(log)
    assert not CONTROL.search(capsys.readouterr().out)
