"""Packages of a user, as `pip install` leaves them behind in a folder."""

from pathlib import Path


def install(site: Path, name: str, entry_points: str, **modules: str) -> Path:
    """Write a package into the folder `site`: its entry points, and the code of its modules by their names."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    for module, code in modules.items():
        (site / f"{module}.py").write_text(code)
    return site
