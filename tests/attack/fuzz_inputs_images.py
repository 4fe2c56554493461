"""Inputs that hold pictures: tar shards, the caches of their indices, and single images."""

import json
import struct
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from xxhash import xxh3_128

from data.index_cache import _DIGEST, _MAGIC  # the layout of a cache, to give a changed one a valid checksum
from tests.pictures import png_chunk

from .fuzz_files import Case
from .fuzz_grammar import Rng, change_tree, damage, pick
from .fuzz_inputs import HERE, Input, Maker, Sound
from .fuzz_seeds import CONFIG, encoded, files_below

_CHECK = ["train", "tiny.yaml", "--check"]


def inputs(seeds: Path) -> dict[str, Input]:
    """Return the inputs by name, from the seeds of fuzz_seeds.make_seeds."""
    config: Sound = {"tiny.yaml": CONFIG.encode()}
    tars = {f"tar/{name}": data for name, data in files_below(seeds / "tar").items() if name.endswith(".tar")}
    cache = next((seeds / "tar" / "cache").glob("*.index")).read_bytes()
    images = {ending: encoded(5, ending) for ending in (".jpg", ".png", ".bmp", ".webp")}
    return {
        "tar": Input({**config, **tars}, [_tar_mutated(tars["tar/0.tar"]), _tar_grammar], 256, 30),
        "cache": Input({**tars, "cache.index": cache}, [_cache_maker(cache)]),
        "image": Input({}, [_image_mutated(images), _image_grammar(images)], 1850, 30),
    }


# ---- tar shards

_TAR = (
    [f"{HERE}:images_of_set", "tar"],
    [*_CHECK, "data.num_classes=0", "data.num_images=0", "data.source=tar", "data.path=tar"],
    ["scripts.data.verify", "tar"],
)


def _tar_mutated(seed: bytes) -> Maker:
    def make(sound: Sound, rng: Rng) -> Case:
        data = bytearray(damage(seed, [seed], rng) if rng.random() < 0.4 else seed)
        for _ in range(int(rng.integers(1, 3))):
            _lie_in_header(data, rng)
        return Case(list(_TAR[0] if rng.random() < 0.8 else pick(rng, _TAR)), {"tar/0.tar": bytes(data)})

    return make


def _lie_in_header(data: bytearray, rng: Rng) -> None:
    """Change a field of a header, and correct its checksum."""
    starts = [place for place in range(0, len(data) - 511, 512) if data[place + 257 : place + 262] == b"ustar"]
    if not starts:
        return
    begin = pick(rng, starts)
    place, length = pick(
        rng,
        (
            (0, 100), (100, 8), (108, 8), (124, 12), (124, 12), (124, 12), (136, 12), (156, 1), (156, 1), (157, 100), (257, 8),
            (345, 155),
        ),
    )  # fmt: skip
    if length == 12:
        options = (
            b"-0000000001\0", b"\x80" + b"\0" * 3 + b"\x7f" + b"\xff" * 7, b"\xff" * 12, b"\x80" + b"\0" * 11, b"77777777777\0",
            b" " * 12, b"0" * 11 + b"\0", rng.bytes(12),
        )  # fmt: skip
        field = pick(rng, options)
    elif length == 1:
        field = pick(rng, [bytes([kind]) for kind in b"0123456789LKxgXSDMNVA\0\xff"])
    else:
        field = pick(
            rng,
            (
                b"", b"../../x.jpg", b"/etc/passwd.jpg", rng.bytes(length), b"\xff\xfe.jpg", b"\x1b[2J.jpg",
                b"a/" * 40 + b".jpg", b".jpg",
            ),
        )  # fmt: skip
    data[begin + place : begin + place + length] = field.ljust(length, b"\0")[:length]
    data[begin + 148 : begin + 156] = b" " * 8
    data[begin + 148 : begin + 156] = f"{sum(data[begin : begin + 512]):06o}\0 ".encode()


def _tar_grammar(sound: Sound, rng: Rng) -> Case:
    """Return a case with a shard of pax records, long names, links and sparse files."""
    out = bytearray()
    pax = (
        b"size=-1", b"size=99999999999999999999", b"size=1e9", b"path=../../x.jpg", b"path=\xff.jpg", b"GNU.sparse.major=1",
        b"GNU.sparse.map=0,9", b"hdrcharset=BINARY", b"comment=" + b"x" * 99999, b"mtime=nan", b"size=" + b"9" * 5000,
        b"linkpath=/",
    )  # fmt: skip
    for number in range(int(rng.integers(1, 8))):
        member = tarfile.TarInfo(
            str(pick(rng, ("a.jpg", f"{number}.jpg", "d/" * 80 + "b.jpg", "x" * 120 + ".jpg", "\udcff.jpg")))
        )
        data = encoded(number)
        if rng.random() < 0.5:
            record = pick(rng, pax)
            claimed = len(record) + 2 + len(str(len(record) + 4)) if rng.random() < 0.8 else int(pick(rng, (0, 5, 10**9)))
            data, member.type = (
                b"%d %s\n" % (claimed, record),
                pick(rng, (tarfile.XHDTYPE, tarfile.XGLTYPE, b"X", tarfile.GNUTYPE_LONGNAME)),
            )
        elif rng.random() < 0.3:
            member.type = pick(
                rng, (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE, tarfile.DIRTYPE)
            )
            member.linkname = str(pick(rng, ("/etc/passwd", "a.jpg", "..")))
        elif rng.random() < 0.5:
            member.name, data = (
                member.name[:-4] + ".cls",
                pick(rng, (b"0", b"1", b"-1", b"99999999", b"9" * 9, b"", b"\xb2", b"x" * 40)),
            )
        member.size = len(data)
        block = bytearray(member.tobuf(pick(rng, (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)), "utf-8", "surrogateescape"))
        out += block * int(pick(rng, (1, 1, 1, 40))) + data + bytes(-len(data) % 512)
    if rng.random() < 0.3:
        _lie_in_header(out, rng)
    return Case(list(_TAR[0]), {"tar/0.tar": bytes(out) + bytes(int(pick(rng, (0, 512, 1024))))})


# ---- index caches


def _cache_maker(seed: bytes) -> Maker:
    """Return a maker of caches with wrong headers or arrays, most of them with a valid checksum."""
    start = len(_MAGIC) + _DIGEST

    def make(sound: Sound, rng: Rng) -> Case:
        length = int.from_bytes(seed[start : start + 8], "little")
        header, rest = json.loads(seed[start + 8 : start + 8 + length]), seed[start + 8 + length :]
        if rng.random() < 0.5:
            text = json.dumps(change_tree(header, rng)).encode().ljust(length)
            body = len(text).to_bytes(8, "little") + text + rest[: len(seed) - start - 8 - len(text)]
        else:
            body = seed[start : start + 8 + length] + damage(rest, [rest], rng)
        body = body if rng.random() < 0.8 else damage(body, [body], rng)
        check = xxh3_128(body).digest() if rng.random() < 0.8 else seed[len(_MAGIC) : start]
        return Case([f"{HERE}:cached_set"], {"cache.index": _MAGIC + check + body})

    return make


# ---- single images


def _image_case(data: bytes, rng: Rng) -> Case:
    if rng.random() < 0.9:
        return Case([f"{HERE}:image", "image"], {"image": data})
    return Case(
        ["scripts.data.folder_to_rec", "people", "out", "--resize", "--threads", "1"],
        {"people/p/0.jpg": data, "people/q/0.jpg": encoded(1)},
    )


def _image_mutated(images: dict[str, bytes]) -> Maker:
    others = list(images.values())
    return lambda sound, rng: _image_case(damage(pick(rng, others), others, rng), rng)


def _image_grammar(images: dict[str, bytes]) -> Maker:
    """Return a maker of images with wrong headers, and of decompression bombs."""
    makers: tuple[Callable[[Rng], bytes], ...] = (
        lambda rng: _sized_jpeg(images[".jpg"], rng),
        _png,
        lambda rng: _patched(images[".bmp"], (18, 22, 10, 28, 30, 34, 46), rng),
        lambda rng: _patched(images[".webp"], (4, 16, 20, 24, 26, 28), rng),
    )
    return lambda sound, rng: _image_case(pick(rng, makers)(rng), rng)


_SIDES = (0, 1, 7, 112, 113, 2000, 2049, 16383, 16384, 30000, 65500, 65535, 10**6, 2**31 - 1, 2**32 - 1)


def _sized_jpeg(data: bytes, rng: Rng) -> bytes:
    """Return a JPEG whose frame claims another size, or whose scans are repeated many times."""
    place = data.index(b"\xff\xc0")
    sides = b"".join(min(int(pick(rng, _SIDES)), 65535).to_bytes(2, "big") for _ in range(2))
    if rng.random() < 0.7:
        data = data[: place + 5] + sides + data[place + 9 :]
    scan = data.index(b"\xff\xda")
    if rng.random() < 0.4:
        kind = pick(rng, (b"\xff\xc0", b"\xff\xc1", b"\xff\xc2", b"\xff\xc3", b"\xff\xc9", b"\xff\xca"))
        data = data[:place] + kind + data[place + 2 : scan] + data[scan:-2] * int(pick(rng, (1, 5, 40, 400)))
    if rng.random() < 0.2:
        data = data[:2] + b"\xff\xe1\xff\xff" * int(pick(rng, (1, 2000))) + data[2:]
    return data


def _png(rng: Rng) -> bytes:
    """Return a PNG with valid checksums, of any size, depth and colour type, often with few bytes for many pixels."""
    width, height = int(pick(rng, _SIDES)), int(pick(rng, _SIDES))
    if rng.random() < 0.4:
        height = max(1, min((1 << 22) // max(width, 1), 2**31))
    depth, colour, lace = (
        int(pick(rng, (1, 2, 4, 8, 8, 16, 3))),
        int(pick(rng, (0, 2, 2, 3, 4, 6, 5))),
        int(pick(rng, (0, 0, 1, 2))),
    )
    rows = zlib.compress(bytes(min(width * height * 4 + height, int(pick(rng, (0, 1000, 1 << 22, 1 << 24))))), 9)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, lace)), (b"IDAT", rows), (b"IEND", b"")]
    extra = pick(rng, (b"tEXt", b"zTXt", b"iCCP", b"acTL", b"PLTE", b"tRNS", b"eXIf", b"fdAT"))
    if rng.random() < 0.6:
        bomb = b"x\0\0" + zlib.compress(bytes(int(pick(rng, (10, 1 << 22, 1 << 25)))), 9)
        chunks.insert(int(rng.integers(4)), (extra, bomb if rng.random() < 0.7 else rng.bytes(int(rng.integers(900)))))
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(kind, data) for kind, data in chunks)


def _patched(data: bytes, places: Sequence[int], rng: Rng) -> bytes:
    """Return the bytes with some four-byte numbers changed."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 3))):
        place = pick(rng, places)
        number = pick(rng, (*_SIDES, 2**32 - 112, 0x80000000, 12, 40, 108, 124))
        changed[place : place + 4] = int(number).to_bytes(4, "little")
    return bytes(changed)
