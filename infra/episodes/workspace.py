"""A workspace as bytes: preserved in the blob store, so that an episode can be graded elsewhere, or again.

Invariant: the same files give the same bytes. Regular files, folders and links are kept; sockets, pipes and devices
that an agent may have made aren't. Unpacking never writes outside its folder.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path


class WorkspaceUnusable(RuntimeError):
    """The bytes are no workspace, or would write outside their folder."""


def pack_workspace(folder: Path) -> bytes:
    """A tar of everything below ``folder``, in a fixed order, without times and owners."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            return None
        member.mtime, member.uid, member.gid, member.uname, member.gname = 0, 0, 0, "", ""
        return member

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in sorted(folder.iterdir()):
            archive.add(entry, arcname=entry.name, filter=plain)
    return buffer.getvalue()


def unpack_workspace(data: bytes, folder: Path) -> None:
    """The inverse, into a new folder. Raises WorkspaceUnusable."""
    folder.mkdir(parents=True)
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r") as archive:
            archive.extractall(folder, filter="tar")
    except tarfile.TarError as error:
        raise WorkspaceUnusable(f"the preserved workspace cannot be unpacked: {error}") from error
