"""Count the cores that this process may use, by its affinity and its cgroup's quota."""

from __future__ import annotations

import os


def available_cores(
    *,
    affinity: int | None = None,
    cgroup_root: str | os.PathLike[str] = "/sys/fs/cgroup",
    cgroup_of_process: str | os.PathLike[str] = "/proc/self/cgroup",
) -> int:
    """Return the cores that this process may keep busy, at least 1.

    Args:
        affinity: cores that the scheduler may use for it; None: ask the system.
        cgroup_root: the directory where the cgroup file system is mounted.
        cgroup_of_process: the file that names the cgroups of the process.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst, "cpu.max", and
    scheduler/sched-bwc.rst for version 1.
    """
    if affinity is None:
        affinity = len(os.sched_getaffinity(0))
    quotas = [
        quota
        for directory in _cgroup_directories(
            os.fspath(cgroup_root), os.fspath(cgroup_of_process)
        )
        if (quota := _quota(directory)) is not None
    ]
    # Rounded up: half a core still runs a process.
    return max(1, min([affinity, *(int(-(-quota // 1)) for quota in quotas)]))


def _cgroup_directories(root: str, membership: str) -> list[str]:
    """Return the directories with the files of a process's cgroups.

    Those of all cgroups above them are included, since each may have a limit.
    """
    directories = []
    for line in (_read(membership) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = os.path.join(root, controllers) if controllers else root
        # In a container the path may be one of the host, which does not exist here.
        # Then only the root can be read, which is the container's own cgroup.
        directory = os.path.join(base, path.strip("/"))
        directories.append(base)
        while directory.startswith(f"{base}/") and len(directory) > len(base) + 1:
            directories.append(directory)
            directory = os.path.dirname(directory)
    return directories


def _quota(directory: str) -> float | None:
    version_2 = _read(f"{directory}/cpu.max")
    if version_2 is not None:
        quota, _, period = version_2.partition(" ")
    else:
        quota = _read(f"{directory}/cpu.cfs_quota_us") or "-1"
        period = _read(f"{directory}/cpu.cfs_period_us") or ""
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None  # "max" or -1: no quota
    return int(quota) / int(period)


def _read(path: str) -> str | None:
    try:
        with open(path, "rb") as file:  # pathlib takes 5 ms to import
            return file.read().decode("ascii", "replace").strip()
    except OSError:
        return None
