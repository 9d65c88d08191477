"""What computes a model's attention and the operations between its matrix products, on the machine at hand.

choose.py       which of them, and why
flash.py        FlashAttention 4, FlashAttention 2 and torch's copy of it
cudnn.py        cuDNN through torch
flex.py         FlexAttention
norm.py         Triton: RMS norms
rotary.py       Triton: norm over heads and rotation of queries and keys, with rotary_kernels.py
activation.py   Triton: SwiGLU
softmax.py      Triton: what the head needs of its logits
triton_ops.py   `Ops` of those
launch.py       how many programs a kernel is launched with
libraries.py    `Ops` of Liger and of QuACK
"""

from prl_models.kernels.choose import Chosen, choose, choose_attention

__all__ = ["Chosen", "choose", "choose_attention"]
