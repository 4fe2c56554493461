"""Draw the demo dataset: synthetic faces, in the formats of real sets.

face demo_data --out datasets/demo

With --identities 10000 sampled classes matter as they do for real sets; the verification sets are those of the default.
Identity fixes a face's geometry, skin, hair and marks; each picture varies pose, light, expression, age, blur, occlusion and
background (identity.py, faces.py). The folder then has train.rec, train.idx and property in InsightFace's header form, and
three verification sets of identities that are not in the training set, each with 10 folds of disjoint identities:
demo_wild (everything varies, as in LFW), demo_profile (frontal against profile, as in CFP-FP) and demo_aged (young against
old, as in AgeDB-30). For `face enrol` and `face search`, people/ has three crops of each of eight people who are not in the
training set, and visitors/ one more of each, and of two strangers. Every picture is a function of (seed, identity, number), so
the same arguments give the same bytes.

Examples:
  face demo_data --out datasets/demo
  face demo_data --out datasets/demo_10000 --identities 10000 --images-per-identity 12
"""

import argparse
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from tqdm import tqdm

from data.drawn.faces import draw_face, landmarks
from data.drawn.identity import Identity, Shot, sample_identity, sample_shot, sample_yaw
from data.landmarks import write_landmarks
from data.recordio.image_record import RecordSetWriter
from eval.pair_sets.bin_file import write_bin
from eval.verification import FOLDS
from utils.cli import make_parser, progress
from utils.machine import num_cores
from utils.parallel import forks_of_torch
from utils.program import run_main

SETS = ("demo_wild", "demo_profile", "demo_aged")
IDENTITIES_PER_FOLD = 10
IMAGES_PER_IDENTITY = 6  # in a verification set; if it compares two kinds, even numbers are of one kind, odd of the other
PAIRS_PER_FOLD = 80  # half genuine, half impostor
PROFILE_YAW = (0.7, 1.0)  # radians: 40 to 57 degrees
_PEOPLE, _STRANGERS, _CROPS = 8, 2, 3  # of people/ and visitors/: the first identities of demo_wild, in pictures it lacks
_AT_ONCE = 16  # pictures that a process draws without asking for more
_AHEAD = 4096  # pictures of 3 kB that wait for the disk
FIRST_VERIFICATION_IDENTITY = 1_000_000  # training identities have smaller numbers, so no identity is in both


class DrawnPicture(NamedTuple):
    """What one picture is a function of."""

    seed: int
    kind: str  # train, or one of SETS
    identity: int
    number: int


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face demo_data", __doc__)
    parser.add_argument("--out", type=Path, default=Path("datasets/demo"), help="folder to create")
    parser.add_argument("--identities", type=int, default=500, help="people in the training set")
    parser.add_argument("--images-per-identity", type=int, default=24, help="pictures of each of them")
    parser.add_argument("--seed", type=int, default=1, help="another seed is another population")
    parser.add_argument("--processes", type=int, default=0, help="0 = one per core; the result is the same")
    parser.add_argument("--landmarks", action="store_true", help="also write landmarks.npy, for data.landmarks")
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset that was made with other arguments")
    return run_main(make, parser.parse_args(arguments))


def make(options: argparse.Namespace) -> None:
    """Write the dataset, unless the folder has it already."""
    if options.identities < 2 or options.identities > FIRST_VERIFICATION_IDENTITY or options.images_per_identity < 1:
        raise ValueError(
            f"--identities must be from 2 to {FIRST_VERIFICATION_IDENTITY} and --images-per-identity at least 1, got "
            f"{options.identities} and {options.images_per_identity}"
        )
    out, receipt, begun = options.out, options.out / "dataset.json", options.out / "dataset.begun.json"
    wanted = {"version": 1, **{key: getattr(options, key) for key in ("identities", "images_per_identity", "seed")}}
    if receipt.is_file() and receipt.read_text(errors="replace") == json.dumps(wanted):
        write_people(out, options.seed)  # a set of an earlier version has none
        write_points(out, options)
        print(f"{out}: there already, with these arguments")
        return
    if (receipt.is_file() or (out / "train.rec").is_file()) and not begun.is_file() and not options.overwrite:
        made = receipt.read_text(errors="replace") if receipt.is_file() else "another program"
        raise ValueError(f"{out} holds a dataset made with {' '.join(made.split())}; add --overwrite, or choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    begun.write_text(json.dumps(wanted))  # marks the files of an interrupted run as ours, which may be overwritten
    receipt.unlink(missing_ok=True)
    num_train = options.identities * options.images_per_identity
    num_set = FOLDS * IDENTITIES_PER_FOLD * IMAGES_PER_IDENTITY
    with progress([], num_train + len(SETS) * num_set, "drawing", "face") as bar:
        write_training_set(out, options, bar)
        for kind in SETS:
            write_verification_set(out, kind, options, bar)
    write_preview(out / "preview.png", options)
    write_people(out, options.seed)
    write_points(out, options)
    begun.replace(receipt)
    print(f"{out}: {num_train} training images of {options.identities} identities; {', '.join(SETS)}; people; preview.png")


def write_training_set(out: Path, options: argparse.Namespace, bar: tqdm) -> None:
    """Write train.rec, train.idx and property, in header form."""
    people, each = options.identities, options.images_per_identity
    pictures = (DrawnPicture(options.seed, "train", person, number) for person in range(people) for number in range(each))
    with RecordSetWriter(out, overwrite=True) as writer:
        for number, jpeg in enumerate(draw_all(pictures, people * each, options.processes)):
            writer.add(number // each, jpeg)
            bar.update()


def write_verification_set(out: Path, kind: str, options: argparse.Namespace, bar: tqdm) -> None:
    """Write one .bin of FOLDS contiguous folds, half of the pairs genuine, identities in one fold only."""
    base = FIRST_VERIFICATION_IDENTITY + SETS.index(kind) * FOLDS * IDENTITIES_PER_FOLD
    identities = range(base, base + FOLDS * IDENTITIES_PER_FOLD)
    numbers = range(IMAGES_PER_IDENTITY)
    pictures = [DrawnPicture(options.seed, kind, person, number) for person in identities for number in numbers]
    jpegs = {}
    for picture, jpeg in zip(pictures, draw_all(pictures, len(pictures), options.processes), strict=True):
        jpegs[picture.identity, picture.number] = jpeg
        bar.update()
    pairs = choose_pairs(kind, base, options.seed, np.random.default_rng([options.seed, 4, SETS.index(kind)]))
    images = [jpegs[side] for first, second, _ in pairs for side in (first, second)]
    write_bin(out / f"{kind}.bin", images, [same for _, _, same in pairs])


def choose_pairs(
    kind: str, base: int, seed: int, rng: np.random.Generator
) -> list[tuple[tuple[int, int], tuple[int, int], bool]]:
    """Return ((identity, number), (identity, number), same) for each pair, fold after fold, genuine ones first; none twice.

    Impostor pairs come from the half of all pairs of people whose skin and hair are most alike, as CALFW selects them by sex
    and race, so that colours alone decide little. If pose is the difficulty (demo_profile), they are any two people.
    """
    pairs = []
    for fold in range(FOLDS):
        people = range(base + fold * IDENTITIES_PER_FOLD, base + (fold + 1) * IDENTITIES_PER_FOLD)
        sides = [(person, number) for person in people for number in range(IMAGES_PER_IDENTITY)]
        candidates = [(a, b) for a in sides for b in sides if (a < b if kind == "demo_wild" else a[1] % 2 < b[1] % 2)]
        alike = people_alike(people, seed, 1.0 if kind == "demo_profile" else 1 / 2)
        for same in (True, False):
            fitting = [(a, b) for a, b in candidates if (a[0] == b[0] if same else frozenset((a[0], b[0])) in alike)]
            for index in rng.choice(len(fitting), PAIRS_PER_FOLD // 2, replace=False).tolist():
                pairs.append((*fitting[index], same))
    return pairs


def people_alike(people: Sequence[int], seed: int, share: float) -> set[frozenset[int]]:
    """Return the given share of all pairs of people, those with the nearest skin and hair colours."""
    drawn = {person: sample_identity(seed, person) for person in people}
    colours = {person: np.concatenate([one.skin, one.hair]) for person, one in drawn.items()}
    pairs = [(a, b) for a in people for b in people if a < b]
    pairs.sort(key=lambda pair: float(np.linalg.norm(colours[pair[0]] - colours[pair[1]])))
    return {frozenset(pair) for pair in pairs[: round(share * len(pairs))]}


def draw_all(pictures: Iterable[DrawnPicture], count: int, processes: int) -> Iterator[bytes]:
    """Yield `count` pictures as JPEG files, in order, drawn by several processes.

    At most _AHEAD pictures are drawn before the caller takes them, so memory does not grow with their number.
    """
    processes, pictures = processes or num_cores(), iter(pictures)
    if processes == 1 or count < 64:
        yield from map(draw_jpeg, pictures)
        return
    with forks_of_torch().Pool(processes, initializer=cv2.setNumThreads, initargs=(1,)) as pool:
        while some := list(itertools.islice(pictures, _AHEAD)):
            yield from pool.imap(draw_jpeg, some, chunksize=_AT_ONCE)


def draw_jpeg(picture: DrawnPicture) -> bytes:
    """Return one picture as a JPEG file."""
    pixels, quality = draw(picture)
    encoded = cv2.imencode(".jpg", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, quality])[1]
    return bytes(encoded.tobytes())


def draw(picture: DrawnPicture) -> tuple[np.ndarray, int]:
    """Return the (112, 112, 3) uint8 RGB pixels and the JPEG quality of one picture."""
    identity, shot, rng = subject(picture)
    return draw_face(identity, shot, rng), shot.quality


def subject(picture: DrawnPicture) -> tuple[Identity, Shot, np.random.Generator]:
    """Return the person of a picture, how it is taken, and what draws all else."""
    seed, kind, identity, number = picture
    rng = np.random.default_rng([seed, 2, identity, number])
    yaw, age = sample_yaw(rng), float(rng.uniform(0, 1))
    if kind == "demo_wild":
        yaw = float(np.clip(rng.normal(0, 0.35), -1, 1))
    elif kind == "demo_profile":
        yaw = float(rng.uniform(-0.2, 0.2) if number % 2 == 0 else rng.choice([-1, 1]) * rng.uniform(*PROFILE_YAW))
    elif kind == "demo_aged":
        yaw = float(np.clip(rng.normal(0, 0.4), -0.9, 0.9))
        age = float(rng.uniform(0, 0.2) if number % 2 == 0 else rng.uniform(0.7, 0.95))
    return sample_identity(seed, identity), sample_shot(rng, yaw, age), rng


def write_points(out: Path, options: argparse.Namespace) -> None:
    """Write landmarks.npy of the training set if it was asked for."""
    if options.landmarks:
        people, each = range(options.identities), range(options.images_per_identity)
        pictures = [DrawnPicture(options.seed, "train", person, number) for person in people for number in each]
        points = [landmarks(*subject(picture)[:2]) for picture in progress(pictures, None, "landmarks", "face")]
        write_landmarks(out / "landmarks.npy", np.array(points))


def write_people(out: Path, seed: int) -> None:
    """Write the crops of people/ and visitors/ that are not there yet."""
    for person in range(_PEOPLE + _STRANGERS):
        for number in range(_CROPS + 1):
            picture = DrawnPicture(seed, "demo_wild", FIRST_VERIFICATION_IDENTITY + person, IMAGES_PER_IDENTITY + number)
            name = f"person_{person + 1}" if person < _PEOPLE else f"stranger_{person + 1 - _PEOPLE}"
            path = out / "people" / name / f"{number + 1}.jpg" if number < _CROPS else out / "visitors" / f"{name}.jpg"
            if (person < _PEOPLE or number == _CROPS) and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(draw_jpeg(picture))


def write_preview(path: Path, options: argparse.Namespace) -> None:
    """Write a contact sheet: eight training identities, a row each; then genuine pairs of each verification set."""
    columns = min(10, options.images_per_identity)
    rows = [
        [draw(DrawnPicture(options.seed, "train", person, number))[0] for number in range(columns)]
        for person in range(min(8, options.identities))
    ]
    for kind in SETS:
        base = FIRST_VERIFICATION_IDENTITY + SETS.index(kind) * FOLDS * IDENTITIES_PER_FOLD
        rows.append([draw(DrawnPicture(options.seed, kind, base + i // 2, i % 2))[0] for i in range(columns)])
    sheet = np.concatenate([np.concatenate(row, axis=1) for row in rows])
    cv2.imwrite(str(path), cv2.cvtColor(sheet, cv2.COLOR_RGB2BGR))


if __name__ == "__main__":
    raise SystemExit(main())
