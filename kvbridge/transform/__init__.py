"""Tensor transforms.

Masks, padding and paging need torch and run in the producer's or the consumer's process. What writes values in fewer
bits on their way between two nodes runs in the nodes, and does without torch.
"""
