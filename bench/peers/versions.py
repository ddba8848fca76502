"""What version of a package is there: installed, or a wheel unpacked into a folder of sys.path."""
import importlib.metadata
import sys
from pathlib import Path

# What a distribution has been called as well.
ALIASES = {'sglang-kernel': ('sgl-kernel',), 'fbgemm-gpu-genai': ('fbgemm-gpu',)}


def version(package):
    names = (package, *ALIASES.get(package, ()))
    for name in names:
        try:
            if found := importlib.metadata.version(name):
                return found
        except (importlib.metadata.PackageNotFoundError, KeyError):  # or a folder without METADATA
            pass
    for folder in sys.path:
        for name in names:
            for info in sorted(Path(folder or '.').glob(f'{name.replace("-", "_")}-*.dist-info')):
                return info.name.removesuffix('.dist-info').split('-')[1]
    return 'of unknown version'
