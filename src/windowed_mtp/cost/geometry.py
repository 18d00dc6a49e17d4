"""The shape of a model, as far as it decides what a decode step must read and compute."""

from __future__ import annotations

from windowed_mtp.results import Record


class Weights(Record):
    """A matrix that every token of a pass is multiplied by, or several of one type.

    Attributes
    ----------
    elements : int
        Number of weights.
    width : int
        Bytes of a weight: 2 for bf16, 1 for fp8.
    replicated : bool
        Whether each device of a tensor-parallel group holds all of it.
    """

    elements: int
    width: int = 2
    replicated: bool = False


class Attention(Record):
    """A layer of attention over the whole cache.

    Attributes
    ----------
    weights : tuple of Weights
        Its projections.
    heads : int
        Query heads.
    score_size, value_size : int
        Length of the vectors that a query's head multiplies and sums for each key: both the head size, or for latent
        attention ``kv_lora_rank + qk_rope_head_dim`` and ``kv_lora_rank`` (projections absorbed, as when decoding).
    cache_heads : int
        Key-value heads, 1 for latent attention; more devices than that hold copies.
    cache_size : int
        Cached elements a token and key-value head.
    """

    weights: tuple[Weights, ...]
    heads: int
    score_size: int
    value_size: int
    cache_heads: int
    cache_size: int


class Recurrent(Record):
    """A layer with a state of fixed size: gated delta rule or Mamba2.

    Attributes
    ----------
    weights : tuple of Weights
        Its projections and convolution.
    state_bytes : int
        Bytes of a sequence's state, the convolution's included.
    state_ops : int
        Operations on the state for each token.
    """

    weights: tuple[Weights, ...]
    state_bytes: int
    state_ops: int


class Experts(Record):
    """A mixture of experts.

    Attributes
    ----------
    experts, per_token : int
        Routed experts, and how many of them a token uses.
    expert : Weights
        One routed expert.
    always : tuple of Weights
        What every token passes through: router, shared experts, projections to and from the experts' space.
    """

    experts: int
    per_token: int
    expert: Weights
    always: tuple[Weights, ...]

    def expected_distinct(self, tokens: int) -> float:
        """Count the experts that some token is expected to use, if each draws its own evenly and by itself.

        A token leaves an expert out with probability ``1 - k/E``, so n tokens use ``E (1 - (1 - k/E)^n)`` of E.

        Parameters
        ----------
        tokens : int
            Tokens of a pass over all its sequences.
        """
        return self.experts * (1 - (1 - self.per_token / self.experts) ** tokens)


class Layers(Record):
    """Layers that one pass goes through; the order plays no role.

    Attributes
    ----------
    attention, recurrent, experts : tuple
        The layers with a cache, with a state, and with experts.
    dense : tuple of Weights
        Other matrices: feed-forward layers without experts, a draft's projection of embedding and hidden state.
    """

    attention: tuple[Attention, ...] = ()
    recurrent: tuple[Recurrent, ...] = ()
    experts: tuple[Experts, ...] = ()
    dense: tuple[Weights, ...] = ()


class Geometry(Record):
    """A model with its draft head.

    Attributes
    ----------
    vocabulary, hidden : int
        Rows and columns of the output head.
    target, draft : Layers
        What one pass of each goes through, the output head aside, which both share.
    head_width : int
        Bytes of a weight of the output head.
    """

    vocabulary: int
    hidden: int
    target: Layers
    draft: Layers
    head_width: int = 2

    @property
    def parameters(self) -> int:
        """Weights of the target, with its embedding and output head; norms and biases aside."""
        layers = self.target
        weights = [
            *layers.dense,
            *(w for layer in layers.attention for w in layer.weights),
            *(w for layer in layers.recurrent for w in layer.weights),
            *(w for layer in layers.experts for w in layer.always),
        ]
        routed = sum(layer.experts * layer.expert.elements for layer in layers.experts)
        return 2 * self.vocabulary * self.hidden + routed + sum(w.elements for w in weights)
