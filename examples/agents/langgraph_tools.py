r"""LangGraph agent (`pip install langgraph langchain-openai`) that calls tools to find a coin.

    perturn evaluate --model tiny-agent --environment agent environment.tasks=examples/agents/tasks.jsonl \
        "environment.command=[venvs/langgraph/bin/python, examples/agents/langgraph_tools.py]"

The recipe on the page docs/how-to/agents.md trains it, with this command and these tasks.
"""

import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

PLACES = ("cabinet 1", "drawer 1", "drawer 2", "shelf 1")
task = json.load(sys.stdin)
looked, said = [], []


@tool
def go_to(place: str) -> str:
    """Go to a place and look for the coin."""
    looked.append(place)
    return "You find the coin." if place == task["hidden"] else "There is no coin here."


model = ChatOpenAI(model="policy").bind_tools([go_to])
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([go_to]))
graph.add_edge(START, "model").add_conditional_edges("model", tools_condition).add_edge("tools", "model")
heard = [("user", f"You see a {', a '.join(PLACES)}. Your task is to: find the coin.")]
for _ in range(4):
    heard = graph.compile().invoke({"messages": heard})["messages"]
    said.append(str(heard[-1].content))
    heard.append(("user", "There is no coin here."))
named = sum(any(place in text for place in PLACES) for text in said)  # a tiny policy calls no tool at first
print(json.dumps({"reward": (task["hidden"] in looked) + 0.1 * named}))
