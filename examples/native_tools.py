"""A world with native tool calls: find the price of a fruit with a tool, and tell the customer.

    perturn check-env examples/native_tools.py:Shop
    perturn evaluate --model Qwen/Qwen2.5-0.5B-Instruct --environment examples/native_tools.py:Shop

`tools` lists functions, or schemas in the format of chat templates. An action is JSON with `text` and `calls`, and a
call is {"name": ..., "arguments": {...}}. `step` receives such actions, and `expert` may return them. The text that
`step` returns is the result of the call. For several calls it returns a list of texts.
"""

import json

PRICES = {"apple": 3, "pear": 4, "plum": 2, "melon": 9}


def look_up_price(fruit: str) -> str:
    """Look up what a fruit costs.

    Args:
        fruit: Name of the fruit, such as apple.
    """
    return f"{PRICES[fruit]} euros" if fruit in PRICES else f"There is no {fruit}."


class Shop:
    """You sell fruit. Look up the price that the customer asks for, and then answer with it."""

    tools = [look_up_price]

    def tasks(self, split):
        return ["apple", "pear"] if split == "train" else ["plum", "melon"]

    def reset(self, task):
        self.fruit = task
        return f"What does a {task} cost?"

    def step(self, action):
        said = json.loads(action)
        if not said["calls"]:
            return "Thank you.", float(str(PRICES[self.fruit]) in said["text"]), True
        results = []
        for call in said["calls"]:
            known = call["name"] == "look_up_price" and call["arguments"].keys() == {"fruit"}
            results.append(look_up_price(**call["arguments"]) if known else "There is no such tool.")
        return results

    def expert(self, task):
        return [{"name": "look_up_price", "arguments": {"fruit": task}}, f"It costs {PRICES[task]} euros."]
