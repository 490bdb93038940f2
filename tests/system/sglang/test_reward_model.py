"""A reward model on the real SGLang: its votes are the numbers that transformers computes."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from clawstream.config import JudgeSettings
from clawstream.events import Question, VoteCast, VoteStatus
from clawstream.inference.reward_model import RewardModel
from clawstream.judging.prompts import PROMPT_VERSION, Prompt
from clawstream.judging.stage import judge_at, judging_stage
from clawstream.judging.votes import Ballot, VoteKey
from clawstream.local.servers.server_process import reserved
from tests.parts.families.standins import FAMILIES, make_folder
from tests.parts.sglang.process import sglang_engine

RATED = [
    ({"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": answer})
    for answer in ("It is 4.", "Five, I think.", "4", "I do not know.")
]


@pytest.mark.sglang
@pytest.mark.timeout(900)
async def test_a_vote_is_the_number_that_transformers_computes_of_the_templated_conversation(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "reward", FAMILIES["smollm2"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 8, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_labels=1,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, max_position_embeddings=512,
        initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    expected = []
    for messages in RATED:
        ids = tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False)
        with torch.no_grad():
            expected.append(float(model(torch.tensor([ids])).logits))
    above = sorted(expected)[1]

    with reserved() as port, sglang_engine(folder, port, "--is-embedding") as url:
        settings = JudgeSettings(url=f"{url}/v1", reward_above=above + 1e-3)
        async with judge_at(settings) as judge:
            assert isinstance(judge, RewardModel)
            stage = judging_stage(settings, judge)
            assert stage.perform is not None
            key = VoteKey(judge.name, PROMPT_VERSION, "t", Question.SCORE, 0)
            ballots = [
                Ballot(session_id="s", key=key, number=0, prompt=Prompt(rated=messages), seed=1) for messages in RATED
            ]
            votes = [vote for ballot in ballots for vote in await stage.perform(ballot)]

    assert len({round(number, 3) for number in expected}) == len(expected)
    for vote, number in zip(votes, expected, strict=True):
        assert isinstance(vote, VoteCast)
        assert vote.status is VoteStatus.READABLE
        assert float(vote.text or "") == pytest.approx(number, abs=1e-3)
        assert vote.score == (1 if number > above else -1)
