"""The rules of WebShop's protocol, with a worked example of our own in a shop that does not exist."""

from perturn.envs.benchmark import worked_example
from perturn.types import EpisodeProtocol, Sampling

_SYSTEM = (
    "You shop on a website for what the instruction says. There are two actions: search[keywords] lists "
    "products, and click[value] presses a button, a product's number or an option that the page shows. An "
    "action that the page does not offer does nothing. Open a product, choose the options that were asked "
    "for, and click[Buy Now] to buy it, which ends the episode."
)

_GOAL = (
    "Instruction: [SEP] i want gluten free biscuits with ginger in a pack of two, "
    "and price lower than 40.00 dollars"
)
_ITEM = (
    f"{_GOAL} [SEP] Back to Search [SEP] < Prev [SEP] flavor name [SEP] ginger [SEP] plain [SEP] dark "
    "chocolate [SEP] size [SEP] pack of one [SEP] pack of two [SEP] Harbour Oat Biscuits, Gluten Free "
    "[SEP] Price: $6.2 [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
)

_DIALOGUE = (
    (
        f"WebShop [SEP] {_GOAL} [SEP] Search",
        "I search for the biscuits by what matters most: gluten free and ginger.",
        "search[gluten free ginger biscuits]",
    ),
    (
        f"{_GOAL} [SEP] Back to Search [SEP] Page 1 (Total results: 3) [SEP] SHOP000004 [SEP] Harbour Oat "
        "Biscuits, Gluten Free [SEP] $6.2 [SEP] SHOP000006 [SEP] Copper Kettle Ginger Biscuits [SEP] $4.75 "
        "[SEP] SHOP000005 [SEP] Harbour Butter Biscuits in a Tin [SEP] $9.0",
        "The first result is gluten free and costs less than 40 dollars. I open it to see its flavors.",
        "click[SHOP000004]",
    ),
    (_ITEM, "There is a ginger flavor, which I choose.", "click[ginger]"),
    (_ITEM, "The pack of two was asked for.", "click[pack of two]"),
    (
        _ITEM,
        "Product, flavor and size are what was asked for, and the price fits. I buy it.",
        "click[Buy Now]",
    ),
)

WEBSHOP_ETO = EpisodeProtocol(
    name="webshop-eto",
    system=_SYSTEM,
    max_turns=10,
    example=worked_example(_DIALOGUE),
    sampling=Sampling(temperature=0.0, max_new_tokens=512),
)
"""Song et al. 2024, arXiv:2403.02502: one worked example, the full history, ten steps, greedy. The system text and the
example are ours, and the search engine is not Lucene, so scores are not those of the paper."""
