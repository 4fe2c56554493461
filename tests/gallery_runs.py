"""A tiny network, drawn people and the command lines of the gallery's programs."""

from pathlib import Path

import cv2
import numpy as np
import torch
from pictures import picture

from backbones import build_backbone
from deploy.gallery.database import Facts
from deploy.gallery.store import NewImage

SIZE, DIM = 48, 16
NETWORK = ["--backbone", "shallow", "--width", "0.125", "--embedding-size", str(DIM), "--threads", "1"]
FACTS = Facts("a network", "0123", DIM, SIZE, "", "largest")


def write_network(path: Path, seed: int = 0, size: int = SIZE) -> list[str]:
    """Write the weights of an untrained network; return the words of a command line that name it."""
    torch.manual_seed(seed)
    torch.save(build_backbone("shallow", DIM, 0.125, image_size=size).state_dict(), path)
    return [str(path), *NETWORK, "--image-size", str(size)]


def png(seed: int, size: int = SIZE) -> bytes:
    return cv2.imencode(".png", picture(seed, size)[:, :, ::-1])[1].tobytes()


def write_people(folder: Path, people: int, pictures: int) -> Path:
    """Write drawn pictures of people, folder/person_2/1.png; return the folder."""
    for person in range(people):
        (folder / f"person_{person}").mkdir(parents=True, exist_ok=True)
        for number in range(pictures):
            (folder / f"person_{person}" / f"{number}.png").write_bytes(png(100 * person + number))
    return folder


def new_images(rng: np.random.Generator, people: list[str], pixels: bool = True) -> list[NewImage]:
    """Return a random image for each name in the list."""
    found = []
    for number, person in enumerate(people):
        drawn = rng.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8) if pixels else None
        embedding = rng.normal(size=DIM).astype(np.float32) * rng.uniform(0.5, 20)
        quality = float(rng.uniform(0.5, 1))
        found.append(NewImage(person, f"{person}/{number}.png", rng.bytes(32), 0, quality, embedding, drawn))
    return found
