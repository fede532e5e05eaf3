"""The decoder stack as a plan counts it: a block among the layers may evaluate its field several times a token."""

from dataclasses import dataclass

from transformers import LlamaConfig

from condense.decoder_stack import find_block

ADJOINT_FLOPS = 8 / 6  # the backward pass evaluates the field again


@dataclass(frozen=True)
class Stack:
    """The decoder stack of a configuration, as a pass runs it."""

    runs: int  # times that a decoder layer reads the tokens, evaluations of the field `layer` included
    memories: int  # members with keys and values in the next segment
    evaluations: int = 0  # of the block's field for each token; 0 without a block
    width: int = 0  # of an MLP field; 0 without one
    is_adjoint: bool = False
    shared: int = 0  # members with the same keys and values in this segment, if the memory passes a gradient

    def projected(self, is_detached: bool) -> int:
        """Returns the number of members that compute keys and values only for the next segment."""
        return self.memories if is_detached else self.memories - self.shared


def stack_of(config: LlamaConfig) -> Stack:
    """Counts a configuration's stack. Raises `ValueError` for a block whose evaluations depend on the text."""
    num_layers, found = config.num_hidden_layers, find_block(config)
    shares = list(getattr(config, "memory_shares", ()))
    if found is None:
        return Stack(num_layers, num_layers, shared=shares.count(0))
    block, settings = found
    position, evaluations, width, is_adjoint = block.cost(settings)
    if shares:
        del shares[position]
    others, shared = num_layers - 1, shares.count(0)
    if not width:
        return Stack(others + evaluations, num_layers, evaluations, shared=shared)
    return Stack(others, others, evaluations, width, is_adjoint, shared)  # such a block has no memory


def repeated_weights(config: LlamaConfig, stack: Stack) -> float:
    """Returns the weights of the field, times the multiplications of a token beyond the first."""
    width, hidden_size = stack.width, config.hidden_size
    if not stack.evaluations:
        return 0
    if not width:
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        attention = 2 * hidden_size * config.head_dim * (heads + groups)
        return (stack.evaluations - 1) * (attention + 3 * hidden_size * config.intermediate_size)
    factor = ADJOINT_FLOPS if stack.is_adjoint else 1
    return (factor * stack.evaluations - 1) * 2 * hidden_size * width
