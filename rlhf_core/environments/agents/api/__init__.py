"""APIs of the policy for agents: chat completions, completions and responses of OpenAI, messages of Anthropic.

`server.py` has their routes. Each translates its requests to `wanted.Wanted`, and what `replies.py` samples back.
"""
