"""Several processes as one trainer. Nothing is imported here: the command line checks layouts without torch.

layout      which ranks share what, in numbers
mesh        the groups that a layout means
runtime     device, process group, what ranks tell one another
sharding    parameters, gradients and moments over ranks
"""
