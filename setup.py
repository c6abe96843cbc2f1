"""What setup.cfg has no words for: a package whose folder stands outside of ``fugaku_gpt/``.

The templates of job scripts are at the top of a checkout, and inside the package once it is installed.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["fugaku_gpt", "fugaku_gpt.*"]), "fugaku_gpt.jobscripts"],
    package_dir={"fugaku_gpt.jobscripts": "jobscripts"},
)
