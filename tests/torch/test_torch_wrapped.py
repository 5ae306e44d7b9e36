"""Modules that are wrapped before the join: compiled whole or by layers, and given adapters by peft."""

import numpy as np
import pytest
import torch

from broker.base.errors import ConfigError
from tests.hub import Hub
from tests.torch import small_models
from tests.torch.test_torch_island import batch, join, network, together, train
from tests.training_loops import stored

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),  # of torch's compiler, which silences them by itself
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),  # of peft
]


def test_islands_with_compiled_modules_and_layers_train_with_a_plain_one(tmp_path):
    plain, whole, layers = (network(seed) for seed in range(3))
    whole = torch.compile(whole, backend="eager")
    for i in (0, 3):
        layers[i] = torch.compile(layers[i], backend="eager")

    def loop(name, model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        with join(hub, model, optimizer, island_id=name) as island:
            train(island, model, optimizer)
        return [each.detach() for each in model.parameters()]

    for model in (whole, layers):
        model(batch(0)[0]).sum().backward()  # compiles, before anybody trains
    with Hub(tmp_path / "store", islands=3, total_tokens=6_000) as hub:
        of_each = together(lambda: loop("plain", plain), lambda: loop("whole", whole), lambda: loop("layers", layers))
    for others in zip(*of_each, strict=True):
        assert all(torch.equal(others[0], each) for each in others)
    exported = {name: torch.from_numpy(array) for name, array in stored(tmp_path / "store").items()}
    assert exported.keys() == {name for name, _ in plain.named_parameters()}
    assert not network().load_state_dict(exported, strict=False).unexpected_keys


@pytest.mark.parametrize("has_base", [True, False])
def test_a_model_with_adapters_of_peft_sends_them_alone_where_its_base_is_a_file(tmp_path, has_base):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    small_models.llama(tmp_path / "base")
    ids = torch.arange(8, 24)[None]

    def adapted():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))

    def loop(name, model):
        optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=3e-3)
        with join(hub, model, optimizer, island_id=name, base=tmp_path / "base" if has_base else None) as island:
            while not island.done:
                optimizer.zero_grad()
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                island.step(loss)
        return model

    first, second = adapted(), adapted()
    compiled = torch.compile(second, backend="eager")
    compiled(input_ids=ids)
    with Hub(tmp_path / "store", islands=2, total_tokens=3_000) as hub:
        together(lambda: loop("a", first), lambda: loop("b", compiled))
    run = stored(tmp_path / "store")
    assert len(run) == (8 if has_base else 8 + 20)  # those of the base, of which two are tied
    assert sum("lora_" in name for name in run) == 8
    before, after = (dict(each.named_parameters(remove_duplicate=False)) for each in (adapted(), first))
    for name, values in run.items():
        np.testing.assert_array_equal(after[name].detach().numpy(), values)
        assert ("lora_" in name) == (not torch.equal(before[name], after[name]))
    first.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    torch.testing.assert_close(loaded(input_ids=ids).logits, second(input_ids=ids).logits)


def test_another_base_is_refused_by_name(tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    def adapted(folder):
        model = AutoModelForCausalLM.from_pretrained(small_models.llama(tmp_path / folder, seed=len(folder)))
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))

    with (
        Hub(tmp_path / "store", islands=2) as hub,
        join(hub, adapted("base"), base=tmp_path / "base"),
        pytest.raises(ConfigError, match=r"base model\.embed_tokens\.weight is"),
    ):
        join(hub, adapted("other"), base=tmp_path / "other")
