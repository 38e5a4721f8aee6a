"""Builds the package from settings.ini, the one place where its data are kept (nbdev reads it too)."""

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

config = ConfigParser(delimiters=["="])
config.read(Path(__file__).parent / "settings.ini", encoding="utf-8")
settings = config["DEFAULT"]

setup(
    name=settings["lib_name"],
    version=settings["version"],
    description=settings["description"],
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=settings["author"],
    author_email=settings["author_email"],
    url=settings["git_url"],
    license="Apache-2.0",
    keywords=settings["keywords"],
    python_requires=">=" + settings["min_python"],
    packages=find_packages(include=["fedl2p", "fedl2p.*"]),
    package_data={"fedl2p": ["py.typed"]},
    install_requires=settings["requirements"].split(),
    extras_require={
        "dev": settings["dev_requirements"].split(),
        "flower": settings["flower_requirements"].split(),
        "docs": settings["docs_requirements"].split(),
    },
    entry_points={"console_scripts": settings["console_scripts"].split()},
    zip_safe=False,
)
