"""What models are built of.

packing.py     where the documents of a row are
attention.py   causal attention over them
kernel.py      the seam of attention kernels
context.py     what models call: attention, also where several ranks share a row
ulysses.py     its exchange of heads for tokens
ring.py        its keys and values from rank to rank
cache.py       attention kept for recomputation
ops.py         the seam of the operations between matrix products
torch_ops.py   them in plain torch, the reference
rope.py        rotary position embeddings
linear.py      matrix products of linear layers
join.py        weights of several layers as one matrix
decoder.py     a model made of all this, from a spec
head.py        log-probabilities and entropies without a [tokens, vocabulary] matrix
lora.py        low-rank adapters
"""
