"""Encoders of transformers: cut behind their layers, they compute what transformers computes."""

import pytest
import torch

from exitflow.errors import ConfigError
from exitflow.models.backbones import TransformersNetwork
from exitflow.models.build import build_model
from exitflow.models.torchvision_operators import with_operators

pytestmark = pytest.mark.heavy

BERT = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 20,
}
KINDS = {
    "bert": BERT,
    "roberta": BERT,
    "electra": {**BERT, "embedding_size": 16},
    "distilbert": {
        "vocab_size": 50,
        "dim": 16,
        "n_layers": 4,
        "n_heads": 2,
        "hidden_dim": 32,
        "max_position_embeddings": 20,
    },
}


def build(name="bert", num_exits=2, **more):
    spec = TransformersNetwork(**{"name": name, "settings": KINDS.get(name, BERT), **more})
    return build_model(spec.resolve(num_exits), (12,), 5, seed=3).eval()


def ids():
    """The second text is shorter: padding has the id 0, or 1 in RoBERTa."""
    return torch.randint(2, 50, (3, 12), generator=torch.Generator().manual_seed(0)).float()


def whole(name):
    with_operators()
    from transformers import AutoConfig, AutoModel

    with torch.random.fork_rng():
        torch.manual_seed(3)
        return AutoModel.from_config(AutoConfig.for_model(name, **KINDS[name])).eval()


@pytest.mark.parametrize("name", KINDS)
def test_the_last_exit_sees_what_transformers_computes_and_padding_changes_nothing(name):
    network, original = build(name, exit_blocks=(1, 4)), whole(name)
    texts = ids()
    padding = original.config.pad_token_id
    texts[1, 7:] = padding
    with torch.no_grad():
        expected = original(input_ids=texts.long(), attention_mask=(texts != padding).long()).last_hidden_state
        first = network.advance(texts, 0, 1)
        carry = network.advance(first, 1, 2)
    torch.testing.assert_close(carry[0, :, :-1], expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(carry[1, :7, :-1], expected[1, :7], rtol=0, atol=1e-5)
    with torch.no_grad():
        for head in network.heads.values():
            torch.nn.init.normal_(head.linear.weight)
        shorter = network.submodel(1, 2)(texts[1:2, :7])
        for exit, (short, padded) in enumerate(zip(shorter, network.submodel(1, 2)(texts[1:2]), strict=True), 1):
            torch.testing.assert_close(short, padded, rtol=0, atol=1e-4, msg=f"exit {exit}")


def test_weights_are_loaded_with_or_without_the_name_of_the_kind(tmp_path):
    original = whole("bert")
    plain = {name: tensor + 1 for name, tensor in original.state_dict().items()}
    torch.save(plain, tmp_path / "plain.pth")
    torch.save(
        {f"bert.{name}": tensor for name, tensor in plain.items()} | {"cls.bias": torch.ones(1)}, tmp_path / "head.pth"
    )
    for file in ("plain.pth", "head.pth"):
        network = build(weights=str(tmp_path / file))
        own = network.state_dict()["stages.1.0.embeddings.word_embeddings.weight"]
        assert torch.equal(own, plain["embeddings.word_embeddings.weight"])
    del plain["embeddings.LayerNorm.bias"]
    torch.save(plain, tmp_path / "less.pth")
    with pytest.raises(ConfigError, match=r"less.pth: does not fit the network; missing: embeddings.LayerNorm.bias"):
        build(weights=str(tmp_path / "less.pth"))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"name": "brt"}, r"transformers cannot make 'brt'"),
        ({"settings": {**BERT, "hidden_size": 15}}, r"transformers cannot make 'bert'"),
        ({"exit_blocks": (2, 5)}, r"exit_blocks: .* 4 blocks, got \[2, 5\]"),
        ({"name": "modernbert", "settings": {**BERT, "pad_token_id": 0}}, "'modernbert' is no encoder"),
        ({"name": "gpt2", "settings": {}}, "'gpt2' is no encoder"),
    ],
)
def test_what_does_not_fit_gets_a_sentence(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        build(**settings)
