"""Commands for what a host lacks, in the words of its distribution. Pure."""

from __future__ import annotations

from builder.doctor.facts import Engine, Os

REPOSITORY = "from NVIDIA's package repository"


def family(os: Os) -> str:
    """`debian`, `ubuntu`, `rhel`, `suse`, or nothing where it is another or not known."""
    names = [os.id or "", *os.like]
    for name in names:
        if name in ("ubuntu", "debian"):
            return name
        if name in ("rhel", "fedora", "centos", "rocky", "almalinux"):
            return "rhel"
        if name.startswith(("suse", "opensuse", "sles")):
            return "suse"
    return ""


_COMMANDS = {"debian": "apt-get install", "ubuntu": "apt-get install", "rhel": "dnf install", "suse": "zypper install"}


def install(os: Os, package: str, what: str) -> str:
    """The command that installs a package of NVIDIA's; in words where the distribution is not known."""
    command = _COMMANDS.get(family(os))
    return f"`{command} {package}` {REPOSITORY}" if command else f"install {what} {REPOSITORY}"


def driver(os: Os, minimum: str) -> str:
    """How to get a driver that is ``minimum`` or later."""
    what = f"install driver {minimum} or later"
    if os.wsl:
        return f"{what} in Windows: WSL uses that one"
    name = family(os)
    if name == "ubuntu":
        branch = minimum.split(".")[0]
        return f"{what} (`apt-get install nvidia-driver-{branch}-server-open`), then restart the machine"
    command = f" (`{_COMMANDS[name]} nvidia-open`)" if name else ""
    return f"{what} {REPOSITORY}{command}, then restart the machine"


def engine(os: Os) -> str:
    """How to install an engine."""
    command = {
        "debian": "`apt-get install docker.io`",
        "ubuntu": "`apt-get install docker.io`",
        "rhel": "`dnf install podman`",
        "suse": "`zypper install docker`, then `systemctl enable --now docker`",
    }
    return command.get(family(os), "install Docker Engine or Podman from the distribution")


def configure(engine: Engine | None) -> str:
    """How the engine learns of the toolkit."""
    if engine is not None and engine.kind == "podman":
        return "`nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`"
    if engine is not None and engine.rootless:
        return (
            "`nvidia-ctk runtime configure --runtime=docker --config=$HOME/.config/docker/daemon.json`, then "
            "`systemctl --user restart docker`"
        )
    return "`nvidia-ctk runtime configure --runtime=docker`, then `systemctl restart docker`"


def toolkit(os: Os, engine: Engine | None) -> str:
    """How to install NVIDIA's container toolkit."""
    return (
        f"{install(os, 'nvidia-container-toolkit', 'the package nvidia-container-toolkit')}, then {configure(engine)}"
    )


def fabric(os: Os, version: str | None) -> str:
    """How to get the fabric manager of the driver's own version."""
    branch = version.split(".")[0] if version else "BRANCH"
    package = f"nvidia-fabricmanager-{branch}" if family(os) in ("debian", "ubuntu") else "nvidia-fabricmanager"
    got = install(os, package, "the fabric manager")
    return f"{got}, of the driver's version ({version or 'see `nvidia-smi`'}), then `systemctl enable --now nvidia-fabricmanager`"


def listed(words: list[str] | tuple[str, ...], most: int = 4) -> str:
    """`a, b and c`; of many the first ones and how many more there are."""
    shown = list(words[:most])
    if len(words) > most:
        return f"{', '.join(shown)} and {len(words) - most} more"
    return " and ".join(part for part in [", ".join(shown[:-1]), *shown[-1:]] if part)


def mebibytes(count: int) -> str:
    """Shared memory as `--shm-size` takes it, `64 MB`: powers of two."""
    return f"{count >> 30} GB" if count >= 1 << 30 else f"{count >> 20} MB"
