"""A few families of models of other libraries; ``make test-models`` runs all of them."""

import pytest
import torch
from frameworks import framework
from test_call import Relate

import ahop_layers as ah
from tests.models import huggingface, others
from tests.models.check import Case, Failed, check

pytestmark = pytest.mark.slow

CASES = {f"{case.library} {case.family}": case for case in (*huggingface.CASES, *others.CASES)}


def needs_transformers_5():
    if int(framework("transformers").__version__.split(".")[0]) < 5:
        pytest.skip("configurations are those of transformers 5")


def small(name, **options):
    """A model of timm with small images."""

    def make():
        torch.manual_seed(0)
        model = framework("timm").create_model(name, img_size=64, num_classes=5, **options)
        return model, (torch.randn(2, 3, 64, 64),)

    return Case("timm", name, make, options={"blocks": 2})


@pytest.mark.parametrize("family", ["dinov3_vit", "siglip_vision_model", "swinv2", "llama", "deberta-v2"])
def test_models_of_transformers(family):
    needs_transformers_5()
    assert check(CASES[f"transformers {family}"], compile=False)["coverage"] == "fully"


def test_a_model_of_torchvision():
    framework("torchvision")
    assert check(CASES["torchvision Swin V2"], compile=False)["how"] == "by hand"


@pytest.mark.parametrize(("case", "how"), [
    (small("eva02_tiny_patch14_224", depth=2, patch_size=16), "scaled_dot_product_attention"),
    (small("cait_xxs24_224", depth=1), "by hand, scaled_dot_product_attention"),
    (
        small("swin_tiny_patch4_window7_224", depths=(1, 1), num_heads=(2, 4), embed_dim=32, window_size=4),
        "by hand",
    ),
], ids=lambda value: value.family if isinstance(value, Case) else "")  # fmt: skip
def test_models_of_timm(case, how):
    if tuple(map(int, framework("timm").__version__.split(".")[:2])) < (1, 0):
        pytest.skip("releases before 1.0 have other arguments")
    result = check(case, compile=False)
    assert (result["coverage"], result["how"]) == ("fully", how)


def test_the_pooling_head_alone_is_not_counted_as_the_model():
    """Without an example only the pooling head of SigLIP, a torch module, is known; the first line says so."""
    needs_transformers_5()
    model, example = CASES["transformers siglip_vision_model"].make()
    assert str(ah.adapt_(model, dry_run=True)).startswith("would adapt 1 of 3 attention modules\n")
    assert str(ah.adapt_(model, example=example)).startswith("adapted 3 of 3 attention modules; ")


def test_a_decoder_with_a_cache_and_grouped_queries():
    needs_transformers_5()
    model, example = CASES["transformers llama"].make()
    ah.adapt_(model.eval(), example=example, blocks=2)
    similarity = model.layers[0].self_attn.similarity
    assert similarity.num_heads == 4  # query heads; there are 2 key heads
    with torch.no_grad():
        for parameter in ah.similarity_parameters(model):
            parameter.add_(0.3 * torch.randn_like(parameter))
        tokens = example["input_ids"]
        whole = model(tokens).last_hidden_state
        first = model(tokens[:, :5], use_cache=True)
        states, cache = [first.last_hidden_state], first.past_key_values
        for index in range(5, tokens.shape[1]):
            step = model(tokens[:, index : index + 1], past_key_values=cache, use_cache=True)
            states.append(step.last_hidden_state)
            cache = step.past_key_values
    torch.testing.assert_close(torch.cat(states, 1), whole, rtol=1e-4, atol=1e-5)


def test_attentions_are_still_recorded():
    """The eager attention of transformers returns its weights, those of the similarity."""
    needs_transformers_5()
    transformers = framework("transformers")
    sizes = {**huggingface.TEXT, "attn_implementation": "eager"}
    model, example = transformers.BertModel(transformers.BertConfig(**sizes)).eval(), huggingface.tokens()
    with torch.no_grad():
        before = model(**example, output_attentions=True).attentions
        ah.adapt_(model, example=example, by_hand=True)
        torch.testing.assert_close(model(**example, output_attentions=True).attentions, before, rtol=1e-4, atol=1e-5)


class Wrong(Relate):
    """Counts its calls in its output."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) + self.calls


def test_the_check_finds_a_model_that_changes():
    with pytest.raises(Failed, match="an output changed by"):
        check(Case("here", "wrong", lambda: (Wrong(), (torch.randn(2, 5, 16),))), compile=False)
