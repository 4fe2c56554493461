"""Template pooling and scores against slow loops and against the published scripts' answers (FACE_ORACLE)."""

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_curve

from eval import templates as templates_module
from eval.templates import pool_templates, published_tar, read_template_set, score_pairs

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("at_once", [1, 3, 1024])
def test_pooling_is_a_mean_over_media_and_a_sum_over_templates(at_once: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(templates_module, "_TEMPLATES_AT_ONCE", at_once)
    rng = np.random.default_rng(0)
    features, scores = rng.normal(size=(60, 5)), rng.uniform(0.5, 1, 60)
    templates, media = rng.integers(10, 17, 60), rng.integers(0, 4, 60)
    numbers, vectors = pool_templates(features, scores, templates, media)
    assert numbers.tolist() == sorted(set(templates.tolist()))
    for number, vector in zip(numbers.tolist(), vectors, strict=True):
        total = np.zeros(5)
        for medium in set(media[templates == number].tolist()):
            chosen = (templates == number) & (media == medium)
            total += np.mean(features[chosen] * scores[chosen, None], axis=0)
        np.testing.assert_allclose(vector, total / np.linalg.norm(total), rtol=1e-12)


def test_pairs_are_dot_products_whatever_the_chunks():
    rng = np.random.default_rng(1)
    vectors, numbers = rng.normal(size=(30, 4)), np.sort(rng.choice(1000, 30, replace=False))
    pairs = numbers[rng.integers(0, 30, (40_000, 2))]
    found = score_pairs(vectors, numbers, pairs)
    row_of = {number: row for row, number in enumerate(numbers.tolist())}
    for p in range(0, 40_000, 997):
        a, b = pairs[p].tolist()
        assert found[p] == pytest.approx(float(vectors[row_of[a]] @ vectors[row_of[b]]), abs=1e-12)


@pytest.mark.parametrize("digits", [1, 3, 9])
def test_the_published_reading_is_the_nearest_point_of_scikit_learns_curve(digits: int):
    rng = np.random.default_rng(digits)
    same = rng.random(3000) < 0.1
    scores = np.where(same, rng.normal(0.5, 0.2, 3000), rng.normal(0, 0.2, 3000)).round(digits)
    far, tar, _ = roc_curve(same, scores)
    far, tar = far[::-1], tar[::-1]
    found = published_tar(scores, same, ("1e-6", "1e-4", "1e-3", "1e-2", "1e-1"))
    for target, value in found.items():
        _, index = min((abs(f - float(target)), i) for i, f in enumerate(far.tolist()))
        assert value == tar[index]


def _meta(folder: Path, **changes: str) -> Path:
    texts = {
        "face_tid_mid": "1.jpg 7 1\n2.jpg 7 2\n3.jpg 9 3\n",
        "name_5pts_score": "".join(f"{i}.jpg {' '.join(str(k + i) for k in range(10))} 0.9\n" for i in (1, 2, 3)),
        "template_pair_label": "7 9 0\n7 7 1\n",
    }
    (folder / "meta").mkdir()
    for name, text in {**texts, **changes}.items():
        (folder / "meta" / f"ijbc_{name}.txt").write_text(text)
    return folder


def test_lists_are_read_and_a_missing_one_is_named(tmp_path: Path):
    found = read_template_set(_meta(tmp_path), "ijbc")
    assert found.images == ["1.jpg", "2.jpg", "3.jpg"] and found.templates.tolist() == [7, 7, 9]
    assert found.points[0].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]] and found.scores.tolist() == [0.9] * 3
    assert found.pairs.tolist() == [[7, 9], [7, 7]] and found.same.tolist() == [False, True]
    with pytest.raises(ValueError, match=r"ijbb_face_tid_mid\.txt: cannot be read"):
        read_template_set(tmp_path, "ijbb")


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"face_tid_mid": "2.jpg 7 1\n1.jpg 7 2\n3.jpg 9 3\n"}, "same order; they differ at line 1"),
        ({"face_tid_mid": "1.jpg 7 1\n2.jpg 7\n"}, "line 2 must be a name and 2 numbers"),
        ({"face_tid_mid": "1.jpg 7 1\n2.jpg 7.5 2\n3.jpg 9 3\n"}, "line 2 must have whole numbers, got 7.5"),
        ({"face_tid_mid": "1.jpg 20000000.5 1\n2.jpg inf 2\n"}, "line 1 must have whole numbers, got 20000000.5"),
        ({"name_5pts_score": "1.jpg 1 2 3 4 5 6 7 8 9 10 nan\n"}, "line 1 must have numbers, got nan"),
        ({"face_tid_mid": ""}, "is empty"),
        ({"template_pair_label": "7 9 0\n7 x 1\n"}, "must have three whole numbers and nothing else"),
        ({"template_pair_label": "7 9 0\n7 9\n"}, "from 3 to 2"),
        ({"template_pair_label": "7 9\n7 7\n"}, "; they have 2"),
        ({"template_pair_label": "7 9 1.5\n"}, "must have three whole numbers and nothing else"),
        ({"template_pair_label": "7 9 1\n7 9 -1\n"}, "labels must be 0 or 1, one is -1"),
        ({"template_pair_label": "7 8 1\n"}, "template 8 has no image"),
    ],
)
def test_damaged_lists_are_named(tmp_path: Path, changes: dict[str, str], said: str):
    with pytest.raises(ValueError, match=said):
        read_template_set(_meta(tmp_path, **changes), "ijbc")


def test_mini_ijb_equals_the_published_scripts(face_oracle: Path):
    metrics = face_oracle / "oracle" / "metrics"
    expected = json.loads((metrics / "expected.json").read_text())["mini_ijb"]
    found = read_template_set(face_oracle / "london" / "mini_ijb" / "IJBC", "ijbc")
    both = np.load(metrics / "mini_ijb_feats.npy")  # float32, in which the views are added
    numbers, vectors = pool_templates(both[:, :16] + both[:, 16:], found.scores, found.templates, found.media)
    assert len(numbers) == expected["templates"] and vectors.sum() == pytest.approx(expected["template_feat_sum"], abs=1e-9)
    scores = score_pairs(vectors, numbers, found.pairs)
    np.testing.assert_allclose(scores, np.load(metrics / "mini_ijb_scores.npy"), atol=1e-9, rtol=0)
    targets = ("1e-06", "1e-05", "0.0001", "0.001", "0.01", "0.1")
    assert published_tar(scores, found.same, targets) == expected["tar_at_far"]
