"""Record the shipped traces: python data/traces/record_traces.py [NAME …]

The model writes five of them and reads two, whose texts were written for this project. Sampling follows rounding, which
differs between processors, so another machine may record other texts under the same seeds.
"""

import sys
from pathlib import Path

import epiviz as ev

FOLDER = Path(__file__).parent

# Prompts that the model answers, and the tokens that it may write.
WRITTEN = {
    "marbles": (
        "Anna, Ben and Carla share 84 marbles. Anna has twice as many as Ben, and Carla "
        "has 12 more than Ben. Explain step by step how to find how many each of them "
        "has, try it in two different ways, and check whether both ways agree.",
        480,
    ),
    "trip": (
        "Plan a trip of 6 days for 4 people step by step. The train costs 38 per person and way, a room for two costs "
        "95 a night, food costs 27 per person and day, and three museums cost 12 per person each. Compute every part, "
        "then the total, then what each person pays, and check the total once more in another order.",
        700,
    ),
    "animals": ("Write a numbered list of 60 animals. After each name write where it lives and what it eats.", 800),
    "sorting": (
        "Explain step by step how to sort the list 29, 4, 17, 8, 42, 15, 23, 1 by insertion sort. Show the whole list "
        "after every step. Then write the same as a Python function, and explain each line.",
        700,
    ),
    "chinese": (
        "请一步一步地解释：小明有 48 个苹果，每天吃 3 个，又每周买 10 个。四周以后他还有多少个？请写出每一周的计算。",
        500,
    ),
}

HARBOUR = """Mira Tolland kept the harbour office in Vessby for eleven years. Her desk stood under the north window, \
and on it lay the green ledger in which every ship was written down. On the third of May the ship Aurora came in with \
214 barrels of salt. Her captain, Jon Reeve, paid 96 crowns and asked for berth seven. Two days later the ship Heron \
brought 58 crates of glass from Lund; her captain, Ida Brandt, had a broken mast and stayed for nine nights in berth \
two. On the tenth of May came the Linnet, which carried letters and one passenger, a doctor named Samuel Okoro, who \
was looking for his sister. The sister, Ruth Okoro, taught music in the house behind the chapel, and nobody had told \
him that she had moved there from Malm in the autumn.

"""
FILLER = """The week after that was quiet. Fog lay on the water until noon, the cranes stood still, and the clerks \
played cards in the back room with the door open so that they could hear the bell. Mira walked along the quay in the \
mornings, counted the gulls on the breakwater, and thought about the roof, which had leaked since the winter. In the \
afternoons she copied old pages, because the ink of the first years had begun to fade. She wrote slowly and did not \
mind. When the sun came out on the ninth day, the nets were hung up to dry along the whole length of the wall, and \
children ran between them. A painter set up his easel by the steps and painted the same boat three times. Nobody \
bought the pictures, so he gave one to the baker, one to the priest, and kept the third for himself. The baker hung \
his over the oven, where it turned brown; the priest put his in a drawer.

"""
HARBOUR_QUESTIONS = """Questions about the story.
Who kept the harbour office in Vessby? Mira Tolland.
What colour was the ledger? Green.
How many barrels of salt did the Aurora bring? 214.
Who was the captain of the Aurora? Jon Reeve.
Which berth did the Aurora ask for? Berth seven.
How many crowns did Jon Reeve pay? 96.
What did the Heron bring from Lund? 58 crates of glass.
Who was the captain of the Heron? Ida Brandt.
How many nights did the Heron stay? Nine nights.
Who was the passenger of the Linnet? Samuel Okoro.
What did Ruth Okoro teach? Music.
From which town had Ruth Okoro moved? Malm."""

KITCHEN = "\n".join(
    f"Shelf {shelf}: the {colour} jar holds {what}, {grams} grams."
    for shelf, (colour, what, grams) in enumerate(
        [
            ("red", "barley", 420), ("blue", "lentils", 365), ("white", "sugar", 910), ("black", "pepper", 75),
            ("green", "peas", 540), ("brown", "coffee", 230), ("yellow", "maize", 685), ("grey", "salt", 1150),
            ("pink", "almonds", 145), ("purple", "raisins", 310), ("orange", "carrots", 480), ("silver", "rice", 1275),
        ],
        start=1,
    )
)  # fmt: skip
KITCHEN_AGAIN = """

Now read the shelves again from the end, and say what you remember.
Shelf 12: the silver jar holds rice, 1275 grams.
Shelf 11: the orange jar holds carrots, 480 grams.
Shelf 10: the purple jar holds raisins, 310 grams.
Shelf 9: the pink jar holds almonds, 145 grams.
Shelf 8: the grey jar holds salt, 1150 grams.
Shelf 7: the yellow jar holds maize, 685 grams.
Shelf 6: the brown jar holds coffee, 230 grams.
Shelf 5: the green jar holds peas, 540 grams.
Shelf 4: the black jar holds pepper, 75 grams.
Shelf 3: the white jar holds sugar, 910 grams.
Shelf 2: the blue jar holds lentils, 365 grams.
Shelf 1: the red jar holds barley, 420 grams."""

# Prompts, and texts that the model reads after them: facts, filler, and the facts again.
READ = {
    "harbour": ("Tell a story about a harbour, then answer questions about it.", HARBOUR + FILLER + HARBOUR_QUESTIONS),
    "kitchen": ("List what is in the kitchen, and repeat it later.", KITCHEN + "\n\n" + FILLER.strip() + KITCHEN_AGAIN),
}


def record(model: ev.Model, name: str) -> ev.Trace:
    if name in READ:
        prompt, text = READ[name]
        return ev.record(model, prompt, text=text, name=name)
    prompt, tokens = WRITTEN[name]
    return ev.record(model, prompt, max_new_tokens=tokens, temperature=0.3, top_p=0.95, seed=0, name=name)


if __name__ == "__main__":
    model = ev.load("smollm2-135m")
    for name in sys.argv[1:] or [*WRITTEN, *READ]:
        trace = record(model, name)
        print(trace, trace.status)
        trace.save(FOLDER / f"{name}.safetensors")
