"""The choices of kernels on which the ranks of a run have agreed; they override this process's own probes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, FrozenSet, Optional

import torch


@dataclass
class KernelChoices:
    """Choices that all ranks of a run share, and its later starts as well: only then do all round alike.

    Attributes:
        in_float32: number type of training → what is computed in float32 nevertheless.
        gelu_by_erf: the exact GELU is computed from the error function where no kernel of ours does it; None: not
            agreed on yet.
        products_by_onednn: float32 products of layers are oneDNN's; None: not agreed on yet.
        compiled: our own compiled kernels are used; None: not agreed on yet.
        compiled_products: type of a product → it is theirs too, where they have such products; none: not agreed on yet.
        products_reason: why layers' products are computed as they are, in one line.
    """

    in_float32: Dict[torch.dtype, FrozenSet[str]] = field(default_factory=dict)
    gelu_by_erf: Optional[bool] = None
    products_by_onednn: Optional[bool] = None
    compiled: Optional[bool] = None
    compiled_products: Dict[torch.dtype, bool] = field(default_factory=dict)
    products_reason: str = ""


RANK_CONSENSUS = KernelChoices()
