"""An encyclopedia of our own invention, and questions on it, in the forms that HotpotQA reads."""

import json

PAGES = [
    {
        "title": "Fernhill Observatory",
        "text": "Fernhill Observatory is an astronomical observatory on the island of Sarn. It was built from 1871 to "
        "1874. Its largest telescope was sold in 1952. Since then it has been a museum. The dome was restored in 1998. "
        "It was founded by the brewer Edda Marwick, who paid for it herself.",
    },
    {
        "title": "Edda Marwick",
        "sentences": [
            "Edda Marwick (1822 – 1890) was a brewer and amateur astronomer.",
            " She was born in Tollbridge and moved to Sarn in 1850.",
        ],
    },
    {
        "title": "Tollbridge",
        "text": "Tollbridge is a market town. It lies on the river Wend, which is crossed by three bridges.",
    },
    {"title": "Sarn (island)", "text": "Sarn is an island of sheep and slate. Sarn has two harbours."},
    {
        "title": "Sarn (island)",
        "text": "The observatory of Sarn stands on its highest hill. No bridge leads to Sarn.",
    },
    {"title": "Holm", "text": "Holm is a lake without islands."},
]

QUESTIONS = [
    {
        "question": "Which river runs through the town where the founder of Fernhill Observatory was born?",
        "answer": "the Wend",
        "type": "bridge",
    },
    {"question": "Do Sarn and Holm both have a harbour?", "answer": "no", "type": "comparison"},
    {
        "question": "How many bridges cross the Wend in Tollbridge?",
        "answer": "three bridges",
        "type": "bridge",
    },
    {"question": "What did Edda Marwick do for a living?", "answer": "brewer", "type": "bridge"},
]


def write_wiki(folder, **settings):
    """Write the files and return the settings that name them."""
    corpus, questions = folder / "corpus.jsonl", folder / "questions.json"
    corpus.write_text("".join(json.dumps(page) + "\n" for page in PAGES))
    questions.write_text(json.dumps(QUESTIONS, indent=1))
    named = {"questions": {"train": str(questions), "test": str(questions)}, "corpus": str(corpus)}
    return named | settings
