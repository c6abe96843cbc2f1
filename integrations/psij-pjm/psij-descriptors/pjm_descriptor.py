"""Names the executor and the launcher of this distribution to PSI/J, which looks for such files when it is imported."""

from packaging.version import Version
from psij.descriptor import Descriptor

__PSI_J_EXECUTORS__ = [
    Descriptor(name="pjm", nice_name="PJM", version=Version("0.1.0"), cls="psij_pjm.executor.PjmJobExecutor")
]
__PSI_J_LAUNCHERS__ = [
    Descriptor(name="pjm_mpiexec", version=Version("0.1.0"), cls="psij_pjm.launcher.PjmMpiexecLauncher")
]
