"""Protocol of HotpotQA with ReAct actions. The worked example is our own, about fictional people and places."""

from perturn.envs.benchmark import worked_example
from perturn.types import EpisodeProtocol, Sampling

_SYSTEM = (
    "You answer a question with the help of an encyclopedia. There are three actions: search[entity] opens "
    "the page of that title and shows its first sentences, or lists similar titles if there is no such "
    "page; lookup[keyword] shows the next sentence of the open page that holds the keyword; finish[answer] "
    "gives the answer, as short as it can be, and ends the episode."
)

_DIALOGUE = (
    (
        "Question: Which river runs through the town where the founder of Fernhill Observatory was born?",
        "I need the founder of Fernhill Observatory, then the birthplace, then the river there.",
        "search[Fernhill Observatory]",
    ),
    (
        "Fernhill Observatory is an astronomical observatory on the island of Sarn. It was built from 1871 "
        "to 1874. Its largest telescope was sold in 1952. Since then it has been a museum. The dome was "
        "restored in 1998.",
        "The first sentences do not say who founded it. I look for the word on the page.",
        "lookup[founded]",
    ),
    (
        "(Result 1 / 1) It was founded by the brewer Edda Marwick, who paid for it herself.",
        "The founder is Edda Marwick. I need to know where she was born.",
        "search[Edda Marwick of Sarn]",
    ),
    (
        "Could not find Edda Marwick of Sarn. Similar: ['Edda Marwick', 'Fernhill Observatory', 'Sarn (island)'].",
        "Her page is called Edda Marwick.",
        "search[Edda Marwick]",
    ),
    (
        "Edda Marwick (1822 – 1890) was a brewer and amateur astronomer. She was born in Tollbridge and "
        "moved to Sarn in 1850.",
        "She was born in Tollbridge. I need the river there.",
        "search[Tollbridge]",
    ),
    (
        "Tollbridge is a market town. It lies on the river Wend, which is crossed by three bridges.",
        "The river Wend runs through Tollbridge, so that is the answer.",
        "finish[Wend]",
    ),
)

HOTPOTQA_REACT = EpisodeProtocol(
    name="hotpotqa-react",
    system=_SYSTEM,
    max_turns=7,
    example=worked_example(_DIALOGUE),
    sampling=Sampling(temperature=0.0, max_new_tokens=100),
)
"""Settings of Yao et al. 2022, arXiv:2210.03629: seven turns, greedy decoding, 100 tokens per turn. The paper has six
worked examples and a live Wikipedia. Perturn has one example and a fixed corpus, so scores are not comparable."""
