"""Reports in HTML: a name with markup is text, in every part of a page and through the programs that write reports."""

from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from scripts.analysis import groups, pairs
from utils.files import write_csv
from utils.report import Page

MARKUP = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'><svg/onload=alert(1)>",
    "</table></td>&lt;<!--",
    "]]>",
]


class _Read(HTMLParser):
    """Notes the elements of a page with the names of their attributes, and its texts."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, ...]] = []
        self.texts: list[str] = []
        self.feed(page.read_text("utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, *(name for name, _ in attrs)))
        self.texts += [value or "" for name, value in attrs if name == "alt"]

    def handle_endtag(self, tag: str) -> None:
        self.elements.append((f"/{tag}",))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_comment(self, data: str) -> None:
        pytest.fail(f"a comment: {data}")


def test_every_part_of_a_page_shows_markup_as_text(tmp_path: Path):
    pages = []
    for text in ("harmless", *MARKUP):
        page = Page(text)
        page.contents()
        page.section(text)
        page.facts([(text, text)])
        page.text(text)
        page.text(text, note=True)
        page.table([text, text], [[text, text]])
        page.picture(b"png", text)
        page.write(tmp_path / "page.html")
        pages.append(_Read(tmp_path / "page.html"))
        assert sum(text in one for one in pages[-1].texts) == 14
    assert all(page.elements == pages[0].elements for page in pages)


@pytest.mark.parametrize(
    ("program", "words"), [(pairs, []), (groups, ["--groups", "groups.csv", "--by", "kind", "--far", "1e-2"])]
)
def test_reports_about_names_with_markup_have_the_elements_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: ModuleType, words: list[str]
):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(20, 1, 8)) + 0.3 * rng.normal(size=(20, 5, 8))
    np.save("t.npy", (vectors / np.linalg.norm(vectors, axis=2, keepdims=True)).reshape(100, 8).astype(np.float32))
    seen = []
    for marks in (["a", "b", "c", "d", "e"], MARKUP):
        people = [f"{marks[number // 5 % 5]} {number // 25}" for number in range(100)]
        rows = [(f"{person}/{number}.jpg", person, 1.0 + number % 7) for number, person in enumerate(people)]
        write_csv(Path("t.csv"), ("name", "person", "norm"), rows)
        write_csv(Path("groups.csv"), ("person", "kind"), sorted({(person, marks[int(person[-1])]) for person in people}))
        assert program.main(["t.npy", *words, "--out", "report", "--again"]) == 0
        page = _Read(Path("report/report.html"))
        seen.append(page.elements)
        assert any(mark in text for mark in marks for text in page.texts)
    assert seen[0] == seen[1]
