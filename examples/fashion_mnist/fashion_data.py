"""Finds the four files of Fashion-MNIST, or downloads them, and reads them with numpy.

Looked for in this order:

1. the directory in $DLCTL_DATA
2. /usr/share/datasets/fashion-mnist, where `apt install dataset-fashion-mnist` puts them
3. the user's cache, ~/.cache/dlctl/fashion-mnist

If they are in none of these they are downloaded into the first or, without $DLCTL_DATA, the last.
Every file is checked against its SHA-256, wherever it came from.
"""

import fcntl
import gzip
import hashlib
import os
import shutil
import tempfile
import urllib.request
import zlib
from pathlib import Path

import numpy as np

URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
TIMEOUT_S = 60

# name -> (shape, SHA-256 of the uncompressed file: gzip notes the time, so .gz files differ)
FILES = {
    "train-images-idx3-ubyte.gz": (
        (60000, 28, 28),
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    "train-labels-idx1-ubyte.gz": (
        (60000,),
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    "t10k-images-idx3-ubyte.gz": (
        (10000, 28, 28),
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    "t10k-labels-idx1-ubyte.gz": (
        (10000,),
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
}


class DataError(Exception):
    """The dataset is not there, or not what it should be."""


def load(part):
    """(images uint8[n, 28, 28], labels uint8[n]) of "train" (60000) or "t10k" (10000)."""
    images, labels = f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz"
    directory = find((images, labels))
    return read(directory / images), read(directory / labels)


def find(names):
    """The first directory that has all these files; downloads them if there is none."""
    own = os.environ.get("DLCTL_DATA")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    target = Path(own) if own else Path(cache) / "dlctl" / "fashion-mnist"
    for directory in (target, DEBIAN) if own else (DEBIAN, target):
        if all((directory / name).is_file() for name in names):
            return directory
    download(names, target)
    return target


def read(path):
    """One file as an array of bytes in its own shape."""
    try:
        return _checked(path)
    except DataError as error:
        raise DataError(f"{path} {error}; remove it and start again") from error


def _checked(path):
    shape, sha256 = FILES[path.name]
    header = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes()
    size = len(header) + int(np.prod(shape))
    try:
        with gzip.open(path) as file:
            data = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot be read ({error})") from error
    if len(data) != size or not data.startswith(header):
        raise DataError(f"is not an idx file of shape {shape}")
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DataError("has not the SHA-256 that it should")
    return np.frombuffer(bytearray(data), np.uint8, offset=len(header)).reshape(shape)


def download(names, directory):
    """Fetch the missing ones of these files. Several processes may call this at the same time."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the other workers wait here, then find the files
            for name in names:
                if not (directory / name).is_file():
                    _download_one(name, directory)
    except OSError as error:
        raise DataError(
            f"cannot download Fashion-MNIST from {URL} into {directory}: {error}. Without network: "
            "`apt install dataset-fashion-mnist`, or copy the four .gz files into a directory and "
            "set DLCTL_DATA to it"
        ) from error


def _download_one(name, directory):
    # It gets its own name only when it is complete and checked.
    with tempfile.TemporaryDirectory(prefix=".part-", dir=directory) as scratch:
        path = Path(scratch) / name
        with (
            urllib.request.urlopen(URL + name, timeout=TIMEOUT_S) as answer,
            path.open("wb") as file,
        ):
            shutil.copyfileobj(answer, file)
        try:
            _checked(path)
        except DataError as error:
            raise DataError(f"what came from {URL + name} {error}; try again") from error
        path.rename(directory / name)
