"""`face adapt` and `face gallery adapt`: from an old network's gallery to one of the new network, and its own thresholds."""

import argparse
import json
import re
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from gallery_runs import DIM, SIZE, png, write_network, write_people
from tiny_runs import error_of

from deploy import FaceNetwork
from deploy.embed.adapter import apply, read_adapter
from deploy.gallery.adapted import adapted_of, result_for_page
from deploy.gallery.store import Gallery
from eval.verification import unit_rows as unit
from scripts.deploy import adapt, embed, enrol, gallery, search

NAME = "people.gallery"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return a folder with two networks, people, an adapter, and the old gallery, without and `with` pictures."""
    folder = tmp_path_factory.mktemp("place")
    more = write_network(folder / "old.pt")[1:]
    write_network(folder / "new.pt", seed=1)
    write_people(folder / "people", 12, 4)
    (folder / "crops").mkdir()
    for number in range(3):
        (folder / "crops" / f"{number}.png").write_bytes(png(5000 + number))
    words = [str(folder / "old.pt"), str(folder / NAME), str(folder / "people"), *more]
    assert enrol.main([*words, "--no-pictures"]) == 0
    words[1] = str(folder / "with")
    assert enrol.main(words) == 0
    nets = [str(folder / "old.pt"), str(folder / "new.pt")]
    assert adapt.main([*nets, str(folder / "people"), "--out", str(folder / "a.safetensors"), "--kinds", "linear", *more]) == 0
    return folder, more


@pytest.fixture
def adapted(place: tuple[Path, list[str]], tmp_path: Path) -> Path:
    words = ["adapt", str(place[0] / NAME), "--with", str(place[0] / "a.safetensors"), "--out", str(tmp_path / NAME)]
    assert gallery.main(words) == 0
    return tmp_path / NAME


def test_the_copy_has_the_adapted_vectors_and_the_old_gallery_stays(
    place: tuple[Path, list[str]], adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, more = place
    before = (folder / NAME).read_bytes()
    map_ = read_adapter(folder / "a.safetensors")
    with Gallery(folder / NAME) as old, Gallery(adapted) as new:
        numbers = np.array([image.number for image in old.images()])
        with old.reading(), new.reading():
            given, found = old._vectors(numbers), new._vectors(numbers)
        assert found == pytest.approx(apply(map_.tensors, given), abs=1e-7)
        lengths = [[image.norm for image in one.images()] for one in (old, new)]
        assert lengths[1] == pytest.approx([map_.lengths * norm for norm in lengths[0]])
        assert new.facts.network == map_.new.digest != old.facts.network and old.people() == new.people()
        assert adapted_of(old) is None and adapted_of(new).thresholds == map_.thresholds
    capsys.readouterr()
    assert gallery.main(["show", str(adapted)]) == gallery.main(["check", str(adapted)]) == 0
    assert f"vectors adapted from  {folder / 'old.pt'}, by the adapter " in capsys.readouterr().out
    # the cosine of a search is that of the query by the new network and the adapted vector; the network is recorded
    words = [str(adapted), str(folder / "crops"), "--k", "100", "--json", str(tmp_path / "found.json"), "--quiet"]
    assert search.main(words) == 0
    network = FaceNetwork(folder / "new.pt", backbone="shallow", width=0.125, embedding_size=DIM, image_size=SIZE)
    cosines = network.embed([folder / "crops" / "0.png"])[0] @ found.T
    result = next(one for one in json.loads((tmp_path / "found.json").read_text())["queries"] if one["picture"] == "0.png")
    assert result["matches"][0]["cosine"] == pytest.approx(cosines.max(), abs=1e-5)
    assert (folder / NAME).read_bytes() == before and sorted(path.name for path in tmp_path.iterdir()) == ["found.json", NAME]
    # new pictures are enrolled beside them; a network that is not the new one is refused
    assert enrol.main([str(folder / "new.pt"), str(adapted), str(folder / "crops"), "--person", "Ann", *more]) == 0
    assert search.main([str(adapted), str(folder / "crops" / "1.png"), "--far", "1e-1"]) == 0
    assert "match: Ann" in capsys.readouterr().out
    assert search.main([str(folder / "old.pt"), str(adapted), str(folder / "crops"), *more]) == 1
    assert "another network" in capsys.readouterr().err


def test_only_thresholds_of_the_adapter_decide_in_an_adapted_gallery(
    place: tuple[Path, list[str]], adapted: Path, capsys: pytest.CaptureFixture[str]
):
    folder, _ = place
    cosine, tar = read_adapter(folder / "a.safetensors").thresholds["1e-1"]
    measured = f"--far 1e-1 (cosine {cosine:.4f})"
    words = [str(adapted), str(folder / "crops"), "--quiet"]
    assert search.main([*words, "--far", "0.1"]) == 0
    said = f"a match is above the cosine {cosine:.4f}: FAR 1e-1 on the set of the adapter's people, where {100 * tar:.2f} % of"
    assert said in capsys.readouterr().out
    assert search.main(words) == 0 and "no threshold" in capsys.readouterr().out
    for flags in map(str.split, ("--threshold 0.3", "--far 1e-2 --results r.json", "--far 1e-2 --set a", "--far 1e-5")):
        said = error_of(search.main([*words, *flags]), capsys)
        assert measured in said and flags[-2] in said
    nothing = {"far": None, "results": None, "pairs": None, "set": None, "gallery": adapted}
    with Gallery(adapted) as opened, Gallery(folder / NAME) as old:
        assert result_for_page(argparse.Namespace(**nothing), opened, ("a result", "1e-2")) == (None, "")
        with pytest.raises(ValueError, match=r"--far: .* the page has no threshold for it"):
            result_for_page(argparse.Namespace(**{**nothing, "far": "1e-2"}), opened, (None, ""))
        assert result_for_page(argparse.Namespace(**nothing), old, ("a result", "1e-2")) == ("a result", "1e-2")
    network = FaceNetwork(folder / "new.pt", backbone="shallow", width=0.125, embedding_size=DIM, image_size=SIZE)
    network.search(adapted, [folder / "crops" / "0.png"])
    assert "adapted from another network, so `threshold` does not hold" in capsys.readouterr().err
    with sqlite3.connect(adapted) as database:  # hostile
        database.execute("UPDATE facts SET digest = substr(digest, 1, length(digest) - 3)")
    assert "does not say" in error_of(search.main([*words, "--far", "1e-1"]), capsys)


def test_what_would_overwrite_or_mix_is_refused(
    place: tuple[Path, list[str]], adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, more = place
    file, start = str(folder / "a.safetensors"), ["adapt", str(folder / NAME), "--with"]
    out = ["--out", str(tmp_path / "b.safetensors")]
    nets = [str(folder / "old.pt"), str(folder / "new.pt")]
    write_people(tmp_path / "few", 5, 2)
    for program, words, says in (
        (gallery, [*start, file, "--out", str(adapted)], "exists already; choose another name"),
        (gallery, ["adapt", str(adapted), "--with", file, "--out", str(tmp_path / "b")], "the adapter is for galleries of"),
        (gallery, [*start, str(folder / "old.pt"), "--out", str(tmp_path / "b")], "is no adapter"),
        (adapt, [*nets, str(folder / "people"), "--out", file, *more], "exists already"),
        (adapt, [*nets, str(folder / "people"), "--out", str(tmp_path / "b.pt"), *more], "must end in .safetensors"),
        (adapt, [nets[0], nets[0], str(folder / "people"), *out, *more], "are of the same network"),
        (adapt, [*nets, str(folder / "crops"), *out, *more], "no picture has a face to embed"),
        (adapt, [*nets, *out], "is no .parquet of"),
        (adapt, [*nets, str(tmp_path / "few"), *out, *more], "6 people or more, got 5"),
    ):
        capsys.readouterr()
        assert says in error_of(program.main(words), capsys, "embedding")
    assert not list(tmp_path.glob("b*")) and not list(tmp_path.glob(".*"))


def test_faces_of_another_size_than_the_networks_go_and_others_stay(place: tuple[Path, list[str]], tmp_path: Path):
    folder, more = place
    words = ["adapt", str(folder / "with"), "--out"]
    for end in ("", "-journal"):  # of a copy that was killed
        (tmp_path / f".same.unfinished{end}").write_bytes(b"half")
    (folder / "with").chmod(0o600)
    assert gallery.main([*words, str(tmp_path / "same"), "--with", str(folder / "a.safetensors")]) == 0
    assert (tmp_path / "same").stat().st_mode & 0o777 == 0o600  # others may read the copy no more than the gallery
    with Gallery(tmp_path / "same") as same:
        assert same.check() == 48 and not list(tmp_path.glob(".*"))
    # with faces there is a better way than to adapt, also afterwards
    assert gallery.main(["reembed", str(tmp_path / "same"), str(folder / "new.pt"), *more]) == 0
    with Gallery(tmp_path / "same") as same:
        assert adapted_of(same) is None
    adapter = read_adapter(folder / "a.safetensors")
    shutil.copy(folder / "with", tmp_path / "other")
    with Gallery(tmp_path / "other") as other:
        facts = other.facts._replace(image_size=64)
        other.adapt(facts, lambda rows: apply(adapter.tensors, rows), 1.0)
        assert other.check() == 0 and len(other.images()) == 48


def test_two_tables_of_a_planted_rotation_give_it_back_with_the_table_that_a_loop_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rng = np.random.default_rng(0)
    people = np.repeat(np.arange(30), 5)
    turn = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    old = unit(rng.normal(size=(30, 8))[people] + 0.4 * rng.normal(size=(150, 8)))
    for name, rows, order in (("old", old, slice(None)), ("new", old @ turn, slice(None, None, -1))):
        columns = {"name": [f"p{p}/{n}.png" for n, p in enumerate(people)], "person": [f"p{p}" for p in people]}
        columns |= {"face": [0] * 150, "norm": [1.0] * 150, "embedding": list(rows.astype(np.float32))}
        table = pa.table({key: values[order] for key, values in columns.items()})
        said = {"network": name, "digest": name, "image_size": "112"}
        pyarrow.parquet.write_table(table.replace_schema_metadata(said), tmp_path / f"{name}.parquet")
    words = [str(tmp_path / "old.parquet"), str(tmp_path / "new.parquet"), "--out", str(tmp_path / "a.safetensors")]
    assert adapt.main(words) == 0
    said = capsys.readouterr().out
    found = read_adapter(tmp_path / "a.safetensors")
    assert found.kind != "identity" and re.search(r"orthogonal 100\.00 %|orthogonal \d", said)
    cosines = np.einsum("nd,nd->n", apply(found.tensors, old), unit(old @ turn))
    assert cosines.min() > 0.99 and (found.old.title, found.new.digest) == ("old", "new")
    rows = [line.split("|")[2] for line in (tmp_path / "a.safetensors.md").read_text().splitlines() if " and " in line][1:]
    assert len(rows) == 3 and rows[0] == rows[1]  # new and old networks are turned copies of each other


def test_tables_of_face_embed_are_taken(place: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, more = place
    for name in ("old", "new"):
        words = [str(folder / f"{name}.pt"), str(folder / "people"), "--out", str(tmp_path / f"{name}.parquet")]
        assert embed.main([*words, "--processes", "1", *more]) == 0
    words = [str(tmp_path / "old.parquet"), str(tmp_path / "new.parquet"), "--out", str(tmp_path / "a.safetensors")]
    assert adapt.main([*words, "--kinds", "linear"]) == 0
    tables, pictures = read_adapter(tmp_path / "a.safetensors"), read_adapter(folder / "a.safetensors")
    assert tables.old._replace(image_size=SIZE, network_path=pictures.old.network_path) == pictures.old
    assert tables.tensors["weight"] == pytest.approx(pictures.tensors["weight"], abs=1e-4)
    assert tables.lengths == pytest.approx(pictures.lengths, rel=1e-4)
    adapted, crops = str(tmp_path / NAME), str(folder / "crops")
    assert gallery.main(["adapt", str(folder / NAME), "--with", words[-1], "--out", adapted]) == 0
    assert "is not recorded; name it, as in" in error_of(search.main([adapted, crops]), capsys, "embedding", "adapting")
    assert search.main([str(folder / "new.pt"), adapted, crops, *more]) == 0
