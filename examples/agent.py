"""An agent of your own: OpenAI's client in a loop. It plays a game of 20 guesses, and prints its reward last.

Nothing here knows of Perturn. Run it against any server: OPENAI_BASE_URL=... python examples/agent.py < task.json
Train it: perturn run recipes/agent-guess.yaml
"""

import json
import sys

from openai import OpenAI

GUESSES = 4

task = json.load(sys.stdin)  # a row of the tasks, such as {"secret": 7}
client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
messages = [
    {"role": "system", "content": "Guess a whole number from 1 to 12. Answer with the number alone."},
    {"role": "user", "content": "Guess."},
]
reward = 0.0
for _ in range(GUESSES):
    answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
    said = answer.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": said})
    try:
        guess = int(said.strip())
    except ValueError:
        messages.append({"role": "user", "content": "That is no number. Again."})
        continue
    if guess == task["secret"]:
        reward = 1.0
        break
    hint = "higher" if guess < task["secret"] else "lower"
    messages.append({"role": "user", "content": f"No, {hint}. Again."})
print(json.dumps({"reward": reward}))
