"""Reads the frames of a video file or a camera, in a process of its own.

What decodes a video, FFmpeg inside OpenCV, is large, and videos come from anywhere. So one that crashes it, asks for too much
memory or blocks costs that process alone, which may read this one file, of a format that names no others.
"""

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.files import check_file, reading
from utils.image import MAX_SIDE

SUFFIXES = (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".ts")  # of video files, in any case
MAX_FRAME_PIXELS = 36_000_000  # 7680 x 4320 and a little
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,avi,matroska,webm,mpegts,mpeg"  # as FFmpeg names them
_MEMORY, _PATIENCE = 8 << 30, 120  # bytes of addresses of the process; seconds for a frame
_LATEST, _FASTEST, _USUAL = 1e7, 1e3, 25.0  # seconds; frames a second; those of a file that says nothing that can be true
_RECORD = struct.Struct("<qqqddd")  # number, height, width, time in seconds, frames a second, frames that the file claims
_FAULTS = {
    3: "cannot be opened: damaged, or neither a camera nor an .mp4, .avi, .mkv, .webm, .mpg or .ts video",
    -signal.SIGALRM: f"no frame came within {_PATIENCE} seconds; it is damaged",
    4: f"a frame may have {MAX_FRAME_PIXELS:,} pixels, and a side {MAX_SIDE:,}; shrink the video",
}
_READER = f"""
import itertools, json, resource, signal, struct, sys, time
most = min([{_MEMORY}, *(one for one in resource.getrlimit(resource.RLIMIT_AS) if one >= 0)])
resource.setrlimit(resource.RLIMIT_AS, (most, most))
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.alarm({_PATIENCE})
sys.path[:], source, every = map(json.loads, sys.argv[1:])
import cv2
camera, begin = isinstance(source, int), time.monotonic()
video = cv2.VideoCapture(source, cv2.CAP_ANY if camera else cv2.CAP_FFMPEG)
if not video.isOpened():
    sys.exit(3)
if not video.get(cv2.CAP_PROP_FRAME_HEIGHT) * video.get(cv2.CAP_PROP_FRAME_WIDTH) <= {MAX_FRAME_PIXELS}:
    sys.exit(4)
for number in itertools.count():
    signal.alarm({_PATIENCE})
    if not video.grab():
        break
    moment = time.monotonic() - begin if camera else video.get(cv2.CAP_PROP_POS_MSEC) / 1000
    good, frame = (False, None) if number % every else video.retrieve()
    signal.alarm(0)
    if good:
        facts = moment, video.get(cv2.CAP_PROP_FPS), 0 if camera else video.get(cv2.CAP_PROP_FRAME_COUNT)
        sys.stdout.buffer.write(struct.pack("{_RECORD.format}", number, *frame.shape[:2], *facts))
        sys.stdout.buffer.write(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB).data)
        sys.stdout.buffer.flush()
"""


class Frame(NamedTuple):
    """A frame of a video."""

    number: int  # from 0
    time: float  # seconds; each frame is later than the one before
    pixels: np.ndarray  # (H, W, 3) uint8 RGB, upright; H and W may change
    claimed: int  # frames that the file says it has, which may be wrong; 0 = it does not say


def read_frames(source: Path | int, every: int = 1) -> Iterator[Frame]:
    """Yield one of `every` frames of a file, or of the camera with a number.

    Raises:
        ValueError: it is no video, its frames are too large, or what decodes it fails or takes too long.
    """
    if isinstance(source, Path):
        with reading(source):
            check_file(source)
    where = source if isinstance(source, int) else os.fsdecode(source.resolve())  # never a protocol, or a pattern of names
    words = json.dumps([place for place in sys.path if isinstance(place, str)]), json.dumps(where), json.dumps(every)
    settings = {
        "OPENCV_FFMPEG_CAPTURE_OPTIONS": f"protocol_whitelist;file|format_whitelist;{_FORMATS}",
        **{"OPENCV_LOG_LEVEL": "SILENT", "OPENCV_FFMPEG_LOGLEVEL": "-8", "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"},
    }
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-I", "-c", _READER, *words], env={**os.environ, **settings}, **pipes) as process:
        assert process.stdout is not None
        try:
            number, time = 0, -_LATEST
            while len(head := process.stdout.read(_RECORD.size)) == _RECORD.size:
                before = number
                number, height, width, said, rate, count = _RECORD.unpack(head)
                if max(height, width) > MAX_SIDE or height * width > MAX_FRAME_PIXELS:
                    raise ValueError(_FAULTS[4])
                data = process.stdout.read(height * width * 3)
                if len(data) < height * width * 3:
                    break
                said, step = round(said, 6), 1 / rate if 0 < rate <= _FASTEST else 1 / _USUAL  # 3.7600000000000002 seconds
                time = said if max(time, -1e-9) < said < _LATEST else max(time, -step) + step * max(1, number - before)
                pixels = np.frombuffer(data, dtype=np.uint8).reshape(height, width, 3)
                yield Frame(number, time, pixels, int(count) if 0 < count < _LATEST * _FASTEST else 0)
            if status := process.wait():
                how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
                raise ValueError(_FAULTS.get(status, f"OpenCV fails on it ({how}); it is damaged"))
        finally:
            process.kill()
