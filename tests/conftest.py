import pytest


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

    from minirl.train.warmup import RECIPE, _model_config, build_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tok = build_tokenizer()
    torch.manual_seed(0)
    m = Qwen3ForCausalLM(_model_config(RECIPE, tok.get_vocab_size()))
    m.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tok, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder
