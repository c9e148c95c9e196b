"""For `--train.agent_func_path`: an executor of its own, that samples twice and has the second reply read the first."""

from copy import deepcopy

from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        params = deepcopy(sampling_params)
        params.max_tokens = max_length - len(prompt)
        tokens = hf_tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"][0].tolist()
        ranges, log_probs = [], [0.0] * len(tokens)
        for turn in range(2):
            output = (await llm_engine.generate(tokens, params)).outputs[0]
            ranges.append((len(tokens), len(tokens) + len(output.token_ids)))
            tokens = tokens + output.token_ids
            log_probs += [at[token].logprob for token, at in zip(output.token_ids, output.logprobs, strict=True)]
            if turn == 0:
                again = hf_tokenizer.encode("<user>user:again<assistant>", add_special_tokens=False)
                tokens, log_probs = tokens + again, log_probs + [0.0] * len(again)
        said = hf_tokenizer.decode(tokens[ranges[-1][0] :], skip_special_tokens=True)
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": tokens,
            "action_ranges": ranges,
            "rollout_log_probs": log_probs,
            "reward": float(said == label),
            "scores": float(said == label),
            "extra_logs": {},
        }


class Inventor(AgentExecutor):
    """Claims to have sampled what it has not."""

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        made = await super().execute(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine)
        return {**made, "action_ranges": [(0, 3)]}


class OfOldVersions(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params):
        return {}
