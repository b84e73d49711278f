# Copyright Spack Project Developers. See COPYRIGHT file for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyMpitrain(PythonPackage):
    """Start and run PyTorch training with mpirun, on anything."""

    pypi = "mpitrain/mpitrain-0.1.0.tar.gz"

    license("MIT", checked_by="mpitrain")

    # RELEASE: of the sdist on PyPI
    version("0.1.0", sha256="0" * 64)

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")

    depends_on("py-jinja2", type=("build", "run"))
    depends_on("py-mpi4py@4.1:", type=("build", "run"))
    depends_on("py-numpy", type=("build", "run"))
    depends_on("py-pillow", type=("build", "run"))
    depends_on("py-psutil", type=("build", "run"))
    depends_on("py-pyyaml", type=("build", "run"))
    depends_on("py-threadpoolctl", type=("build", "run"))
    depends_on("py-torch@2.9:", type=("build", "run"))
    depends_on("py-torchvision", type=("build", "run"))
    depends_on("py-tqdm", type=("build", "run"))
