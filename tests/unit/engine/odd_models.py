"""Parts of a Llama, and models of them, that look like the usual ones and compute something else: nothing may stand for
them that computes the usual."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm


class NormOfAnotherKind(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + 0.01


class NormThatMayBeGated(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(hidden_states if gate is None else hidden_states * gate)


class AnotherMLP(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class ClampedMLP(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.act_fn(self.gate_proj(x)).clamp(max=200), self.up_proj(x).clamp(min=-200, max=200)
        return self.down_proj(gate * up)


class MLPThatMayBeScaled(LlamaMLP):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x) * scale


class NegatedKeys(LlamaAttention):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):  # type: ignore[no-untyped-def]
        cos, sin = position_embeddings
        return super().forward(hidden_states, (cos, -sin), attention_mask, **kwargs)


class AnotherOutput(LlamaAttention):
    def forward(self, hidden_states, position_embeddings, **kwargs):  # type: ignore[no-untyped-def]
        output, weights = super().forward(hidden_states, position_embeddings, **kwargs)
        return output * 1.01, weights


class Raises(LlamaAttention):
    def forward(self, hidden_states, position_embeddings, **kwargs):  # type: ignore[no-untyped-def]
        raise NotImplementedError


class HalvedSum(LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):  # type: ignore[no-untyped-def]
        return 0.5 * super().forward(hidden_states, **kwargs)


class NormsTheOtherWayRound(LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):  # type: ignore[no-untyped-def]
        attended, _ = self.self_attn(hidden_states=self.post_attention_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.input_layernorm(hidden_states))


class ParallelParts(LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):  # type: ignore[no-untyped-def]
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
        return hidden_states + attended + self.mlp(self.post_attention_layernorm(hidden_states))


class Tuple(LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):  # type: ignore[no-untyped-def]
        return (super().forward(hidden_states, **kwargs),)


class NoFirstSum(LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):  # type: ignore[no-untyped-def]
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        return attended + self.mlp(self.post_attention_layernorm(attended))


class ScaledLogits(LlamaForCausalLM):
    def forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / 8
        return output


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 8


def scale_logits(model: LlamaForCausalLM) -> None:
    model.__class__ = ScaledLogits


def scale_embedding(model: LlamaForCausalLM) -> None:
    model.model.embed_tokens.__class__ = ScaledEmbedding


def bound_embedding(model: LlamaForCausalLM) -> None:
    model.model.embed_tokens.max_norm = 1.0


def use_fewer_layers(model: LlamaForCausalLM) -> None:
    model.config.num_hidden_layers -= 1


def add_a_part(model: LlamaForCausalLM) -> None:
    model.model.adapter = nn.Identity()


def add_between_layers(model: LlamaForCausalLM) -> None:
    model.model.layers[1].register_forward_hook(lambda _module, _inputs, output: output + 1.0)
