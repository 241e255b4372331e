"""Generate every word the tiny model is trained on.

Nothing is downloaded and nothing is copied: a small grammar writes simple English stories and dialogues, and a
task generator hides keyed 4-digit codes in such text and asks for them.  All of it is a pure function of the
``random.Random`` that the caller passes in, so a seed and a step number name a training batch exactly.

The text never contains digits other than the codes.  That is deliberate: the trainer finds the tokens whose loss
matters for recall by looking for digits, and the model has no other source of digits to confuse them with.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Message = dict[str, str]

BOYS = ("Tom", "Ben", "Max", "Sam", "Leo", "Jack", "Finn", "Hugo", "Tim", "Oscar")
GIRLS = ("Lily", "Mia", "Anna", "Zoe", "Ella", "Ruby", "Nina", "Clara", "Rosa", "Ivy")
ANIMALS = ("cat", "dog", "rabbit", "fox", "bear", "duck", "mouse", "owl", "frog", "hen", "pony", "goat")
TRAITS = ("little", "small", "young", "brave", "kind", "happy", "shy", "clever", "funny", "quiet")
PLACES = ("park", "forest", "garden", "farm", "river", "beach", "hill", "village", "lake", "market", "field")
COLOURS = ("red", "blue", "green", "yellow", "white", "brown", "pink", "black")
TOYS = ("ball", "kite", "hat", "book", "boat", "cup", "doll", "drum", "lamp", "bell", "scarf", "blanket")
FOODS = ("cake", "bread", "soup", "pie", "honey", "cheese", "rice", "fruit", "jam", "corn")
SPOTS = (
    "under the bed",
    "behind the door",
    "near the old tree",
    "under a bush",
    "behind a big rock",
    "by the gate",
    "next to the well",
    "in the tall grass",
    "under the bridge",
    "behind the barn",
)
WEATHER = ("sunny", "warm", "cold", "windy", "bright", "cloudy", "rainy")
GAMES = (
    "ran in the grass",
    "played hide and seek",
    "sang a song",
    "danced in the sun",
    "jumped over the rocks",
    "climbed the hill",
    "looked at the clouds",
    "threw stones into the water",
    "drew pictures in the sand",
)
SKILLS = ("swim", "sing", "dance", "ride a bike", "climb a tree", "fly a kite", "paint", "whistle", "read")

#: Names of codes.  None of these words occurs in the stories, so a key in the text always belongs to a code.
KEYS = (
    "maple",
    "copper",
    "tiger",
    "violet",
    "marble",
    "rocket",
    "silver",
    "coral",
    "pepper",
    "falcon",
    "lemon",
    "planet",
    "ginger",
    "velvet",
    "walnut",
    "comet",
    "dragon",
    "cactus",
    "pearl",
    "bronze",
    "zebra",
    "island",
    "castle",
    "jungle",
    "magnet",
    "needle",
    "orange",
    "panda",
    "quartz",
    "ribbon",
    "saddle",
    "temple",
    "umbrella",
    "valley",
    "wizard",
    "yogurt",
    "anchor",
    "banjo",
    "cobalt",
    "denim",
    "ember",
    "fossil",
    "goblin",
    "hammer",
    "indigo",
    "jigsaw",
    "kernel",
    "lantern",
)

KEY_STATEMENTS = (
    "The code for {key} is {code}.",
    "The code for {key} is {code}.",
    "Remember that the code for {key} is {code}.",
    "Note: the code for {key} is {code}.",
    "Please keep in mind that the code for {key} is {code}.",
)
KEY_QUESTIONS = (
    "What is the code for {key}?",
    "What is the code for {key}?",
    "Tell me the code for {key}.",
    "Do you remember the code for {key}?",
    "Please give me the code for {key}.",
)
KEY_ANSWER = "The code for {key} is {code}."


@dataclass(frozen=True)
class Character:
    """Someone in a story, with the words needed to speak of them consistently."""

    name: str
    kind: str
    he: str
    him: str
    his: str

    @property
    def subject(self) -> str:
        """The pronoun at the start of a sentence."""
        return self.he.capitalize()


@dataclass(frozen=True)
class RecallTask:
    """A text with keyed codes in it and the questions about some of them, in order."""

    context: str
    codes: tuple[tuple[str, str], ...]
    questions: tuple[tuple[str, str, str], ...]
    """Triples of question, full answer, code."""

    def plain(self) -> tuple[str, str]:
        """The task as plain text, split where the first question starts."""
        parts = [f"\n\nQuestion: {question}\nAnswer: {answer}" for question, answer, _ in self.questions]
        return self.context, "".join(parts)

    def plain_prompt(self) -> str:
        """The text and the first question, up to where the model has to answer."""
        return f"{self.context}\n\nQuestion: {self.questions[0][0]}\nAnswer:"

    def chat(self) -> list[Message]:
        """The task as a conversation: the text and the first question come in one user turn."""
        messages: list[Message] = []
        for index, (question, answer, _) in enumerate(self.questions):
            text = f"{self.context}\n\n{question}" if index == 0 else question
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        return messages


def estimate_tokens(text: str) -> int:
    """Guess the number of tokens without a tokenizer; the grammar's words are nearly all one token each."""
    return len(re.findall(r"[A-Za-z]+|[^A-Za-z\s]|\n", text))


def article(phrase: str) -> str:
    """Put the right indefinite article before a phrase."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def make_character(rng: random.Random, kind: str | None = None, avoid: Sequence[str] = ()) -> Character:
    """Invent someone: a child, or an animal when ``kind`` names one (or by chance)."""
    girl = rng.random() < 0.5
    name = rng.choice([n for n in (GIRLS if girl else BOYS) if n not in avoid])
    if kind is None:
        kind = rng.choice(ANIMALS) if rng.random() < 0.4 else ("girl" if girl else "boy")
    pronouns = ("she", "her", "her") if girl else ("he", "him", "his")
    return Character(name, kind, *pronouns)


def opening(rng: random.Random, hero: Character) -> list[str]:
    """Introduce the hero."""
    trait = rng.choice(TRAITS)
    return [
        rng.choice(
            (
                f"Once upon a time there was {article(trait)} {hero.kind} named {hero.name}.",
                f"There once was {article(trait)} {hero.kind} called {hero.name}.",
                f"{hero.name} was {article(trait)} {hero.kind}.",
                f"One day, {article(trait)} {hero.kind} named {hero.name} woke up early.",
                f"In a small house near the {rng.choice(PLACES)} lived {article(trait)} {hero.kind} named {hero.name}.",
                f"Long ago, {article(trait)} {hero.kind} named {hero.name} lived by the {rng.choice(PLACES)}.",
            )
        )
    ]


def setting(rng: random.Random, hero: Character, place: str) -> list[str]:
    """Say what the day was like and where the hero went; sometimes say nothing."""
    weather = rng.choice(WEATHER)
    lines = [
        rng.choice(
            (
                f"It was {article(weather)} day.",
                f"The day was {weather}.",
                f"One {weather} morning, {hero.he} went out.",
                f"{hero.subject} liked {weather} days very much.",
                f"{hero.subject} loved to go to the {place}.",
            )
        )
    ]
    lines.append(
        rng.choice(
            (
                f"{hero.name} went to the {place}.",
                f"{hero.name} walked to the {place} to play.",
                f"{hero.subject} wanted to see the {place}.",
                f"{hero.subject} ran all the way to the {place}.",
            )
        )
    )
    return lines if rng.random() < 0.8 else lines[1:]


def meeting(rng: random.Random, hero: Character, friend: Character) -> str:
    """Bring in the second character, whose kind is told here once."""
    return rng.choice(
        (
            f"Then {hero.he} met {article(friend.kind)} named {friend.name}.",
            f"Soon {article(friend.kind)} named {friend.name} came by.",
            f"There {hero.he} saw {friend.name} the {friend.kind}.",
            f"A friend was there too, {article(friend.kind)} named {friend.name}.",
        )
    )


def thanks(rng: random.Random, hero: Character, friend: Character) -> str:
    """Let the hero thank the friend."""
    return rng.choice(
        (
            f'"Thank you, {friend.name}!" said {hero.name}.',
            f'"You are a good friend," {hero.name} told {friend.him}.',
            f"{hero.name} gave {friend.name} a big hug.",
            f'{hero.name} smiled and said, "Thank you so much!"',
        )
    )


def ending(rng: random.Random, hero: Character, friend: Character | None = None) -> list[str]:
    """Close the story."""
    if friend is None:
        return [
            rng.choice(
                (
                    f"{hero.name} was very happy that day.",
                    f"That night {hero.name} slept well and had a good dream.",
                    f"{hero.subject} went home with a big smile.",
                    f"{hero.name} never forgot that day.",
                    f"{hero.subject} was proud and told everyone at home about it.",
                )
            )
        ]
    return [
        rng.choice(
            (
                f"From that day on, {hero.name} and {friend.name} were best friends.",
                f"{hero.name} and {friend.name} walked home together as the sun went down.",
                "They were both happy, and they played until night.",
                f"{hero.name} and {friend.name} laughed and went home for dinner.",
                f"After that, {hero.name} and {friend.name} met every day.",
            )
        )
    ]


def play(rng: random.Random) -> str:
    """Say what two friends did together."""
    first, second = rng.sample(GAMES, 2)
    return rng.choice(
        (
            f"They {first} and {second}.",
            f"First they {first}, and then they {second}.",
            f"All day long they {first}.",
            f"Together they {first} and laughed.",
        )
    )


def plot_lost(rng: random.Random, hero: Character, friend: Character, _place: str) -> list[str]:
    """A thing is lost, looked for and found."""
    toy = f"{rng.choice(COLOURS)} {rng.choice(TOYS)}"
    noun = toy.split()[1]
    wrong, right = rng.sample(SPOTS, 2)
    return [
        rng.choice(
            (
                f"{hero.subject} had {article(toy)} and took it everywhere.",
                f"{hero.subject} loved {hero.his} {toy} more than anything.",
                f"{hero.subject} took {hero.his} {toy} along.",
            )
        ),
        rng.choice(
            (
                f"But then the {noun} was gone!",
                f"Suddenly {hero.he} could not find the {noun}.",
                f"After some time, {hero.he} saw that {hero.his} {noun} was lost.",
            )
        ),
        rng.choice(
            (
                f"{hero.name} was sad and began to cry.",
                f'"Oh no! Where is my {noun}?" said {hero.name}.',
                f"{hero.subject} felt very sad.",
            )
        ),
        meeting(rng, hero, friend),
        rng.choice((f'"What is wrong?" asked {friend.name}.', f'"Why are you sad?" {friend.name} asked.')),
        rng.choice((f'"I lost my {toy}," said {hero.name}.', f'"I cannot find my {noun}," {hero.name} said.')),
        rng.choice(
            (f'"I will help you look," said {friend.name}.', f'"Do not cry. Let us look for it," said {friend.he}.')
        ),
        rng.choice((f"They looked {wrong}, but it was not there.", f"First they looked {wrong}. There was nothing.")),
        rng.choice(
            (
                f"Then they looked {right}, and there was the {noun}!",
                f"At last {friend.name} found the {noun} {right}.",
                f"Then {hero.name} looked {right} and saw something {toy.split()[0]}. It was the {noun}!",
            )
        ),
        thanks(rng, hero, friend),
        *ending(rng, hero, friend),
    ]


def plot_share(rng: random.Random, hero: Character, friend: Character, _place: str) -> list[str]:
    """Food is shared with someone hungry."""
    food = rng.choice(FOODS)
    return [
        rng.choice(
            (
                f"{hero.subject} had some {food} in {hero.his} bag.",
                f"{hero.his.capitalize()} mother gave {hero.him} some {food}.",
            )
        ),
        rng.choice((f"{hero.subject} sat down to eat.", f"{hero.subject} was about to eat it.")),
        meeting(rng, hero, friend),
        rng.choice(
            (
                f"{friend.name} looked hungry.",
                f'"I am so hungry," said {friend.name}.',
                f"{friend.name} had nothing to eat that day.",
            )
        ),
        rng.choice(
            (f"{hero.name} thought for a moment.", f"{hero.name} looked at the {food} and then at {friend.name}.")
        ),
        rng.choice(
            (
                f'"You can have half of my {food}," said {hero.name}.',
                f'"Please eat with me," said {hero.name}.',
                f"So {hero.he} gave {friend.name} half of the {food}.",
            )
        ),
        rng.choice(
            (f"They ate the {food} together, and it was very good.", f"The {food} was so good that they ate it all.")
        ),
        rng.choice((f'"Thank you for sharing," said {friend.name}.', f'"You are very kind," said {friend.name}.')),
        rng.choice(
            (
                f"{hero.name} learned that sharing makes food taste better.",
                play(rng),
                "It is good to share with others.",
            )
        ),
        *ending(rng, hero, friend),
    ]


def plot_friend(rng: random.Random, hero: Character, friend: Character, _place: str) -> list[str]:
    """Someone lonely finds a friend."""
    return [
        rng.choice(
            (
                f"{hero.subject} had no one to play with.",
                f"{hero.subject} was all alone and felt sad.",
                f"{hero.subject} wished for a friend.",
            )
        ),
        meeting(rng, hero, friend),
        rng.choice(
            (
                f"{friend.name} was shy and looked at the ground.",
                f"{friend.name} sat alone by the water.",
                f"{friend.name} was hiding {rng.choice(SPOTS)}.",
            )
        ),
        rng.choice(
            (
                f'"Hello, my name is {hero.name}," said {hero.name}.',
                f'"Hi! I am {hero.name}. What is your name?" asked {hero.name}.',
            )
        ),
        rng.choice(
            (
                f'"I am {friend.name}," said {friend.he}.',
                f'"My name is {friend.name}," said {friend.name} with a small voice.',
            )
        ),
        rng.choice(
            (f'"Do you want to play with me?" asked {hero.name}.', f'"Let us play together!" said {hero.name}.')
        ),
        rng.choice(
            (f"{friend.name} smiled.", f'"Yes, I would like that," said {friend.name}.', f'"Yes!" said {friend.name}.')
        ),
        play(rng),
        rng.choice((f"{hero.name} was not alone any more.", f"Now {hero.name} had a friend.", play(rng))),
        *ending(rng, hero, friend),
    ]


def plot_night(rng: random.Random, hero: Character, _friend: Character, _place: str) -> list[str]:
    """A noise in the night turns out to be harmless."""
    cause = rng.choice(
        ("the wind in the trees", "a branch at the window", "rain on the roof", "an old clock", "a mouse with a nut")
    )
    return [
        rng.choice(
            ("In the evening it became dark.", "That night there was a big storm.", "At night the moon was bright.")
        ),
        rng.choice(
            (f"{hero.name} was in bed when {hero.he} heard a noise.", f"{hero.name} heard a strange sound outside.")
        ),
        rng.choice(
            ('"Knock, knock, knock," it went.', '"Whoo, whoo," went the sound.', '"Tap, tap, tap," went the sound.')
        ),
        rng.choice((f"{hero.subject} was afraid and hid under the blanket.", f"{hero.name} was scared.")),
        rng.choice((f"{hero.subject} called {hero.his} mother.", f"{hero.subject} ran to {hero.his} father.")),
        rng.choice(('"Do not be afraid. Let us look together."', '"I am here. We will find out what it is."')),
        rng.choice(("They took a lamp and looked.", "They opened the door very slowly.")),
        rng.choice((f"It was only {cause}!", f"And what was it? It was {cause}.")),
        rng.choice((f"{hero.name} laughed, and the fear was gone.", f'"That is not scary at all," said {hero.name}.')),
        *ending(rng, hero),
    ]


def plot_garden(rng: random.Random, hero: Character, friend: Character, _place: str) -> list[str]:
    """A seed is planted and grows."""
    plant = rng.choice(("flower", "tree", "bean", "carrot", "rose", "pumpkin"))
    colour = rng.choice(COLOURS)
    return [
        rng.choice(
            (
                f"{hero.subject} found a tiny seed on the ground.",
                f"An old woman gave {hero.him} a tiny seed.",
                f"{friend.name} the {friend.kind} gave {hero.him} a seed.",
            )
        ),
        rng.choice((f"{hero.name} put the seed into the ground.", f"{hero.subject} dug a hole and planted it.")),
        rng.choice((f"Every day {hero.he} gave it water.", f"{hero.subject} gave it water each morning.")),
        rng.choice(("For many days, nothing happened.", "Days went by, but there was nothing to see.")),
        rng.choice((f'"Please grow, little seed," said {hero.name}.', f'"I must wait," said {hero.name}.')),
        rng.choice(("The sun was warm and the rain was soft.", f"{hero.subject} did not give up.")),
        rng.choice(("Then one morning there was a small green leaf.", "One day a little leaf came out of the ground.")),
        rng.choice(
            (
                f"It grew and grew, and it became a big {colour} {plant}.",
                f"Soon it was a beautiful {colour} {plant}.",
                f"After some weeks there was {article(plant)} as big as {hero.name}!",
            )
        ),
        rng.choice((f"{hero.name} showed it to everyone in the village.", f'"Look what I grew!" said {hero.name}.')),
        *ending(rng, hero),
    ]


def plot_baking(rng: random.Random, hero: Character, friend: Character, _place: str) -> list[str]:
    """Something is baked for a party."""
    food = rng.choice(("cake", "pie"))
    return [
        rng.choice(
            (
                f"It was the birthday of {friend.name} the {friend.kind}.",
                f"{hero.subject} wanted to make a party for {friend.name}.",
            )
        ),
        rng.choice((f'"I will bake {article(food)}," said {hero.name}.', f"So {hero.he} wanted to bake some {food}.")),
        rng.choice(
            (f"{hero.subject} took milk, eggs and flour.", f"{hero.subject} put flour, sugar and milk in a big bowl.")
        ),
        rng.choice(
            ("But there was no sugar in the house.", "But there were no eggs left.", "The flour fell on the floor.")
        ),
        rng.choice(
            (f"{hero.name} went to the market to get more.", f"{hero.name} asked the old woman next door for help.")
        ),
        rng.choice((f"Soon the {food} was in the oven.", f"Then {hero.he} put the {food} in the oven and waited.")),
        rng.choice(("It smelled so good!", "The whole house smelled sweet.")),
        rng.choice((f"{friend.name} came and saw the {food}.", f'"Is this for me?" asked {friend.name}.')),
        rng.choice((f'"Happy birthday, {friend.name}!" said {hero.name}.', f'"I made it for you," said {hero.name}.')),
        rng.choice((f"They ate the {food} and sang a song.", f"{friend.name} was so happy that {friend.he} danced.")),
        *ending(rng, hero, friend),
    ]


def plot_rescue(rng: random.Random, hero: Character, friend: Character, _place: str) -> list[str]:
    """A small animal is saved."""
    small = rng.choice(("bird", "kitten", "puppy", "lamb", "squirrel"))
    where, tool = rng.choice(
        (
            ("in a tree", "a tall ladder"),
            ("in a deep hole", "a long rope"),
            ("in the cold water", "a long branch"),
            ("on a high roof", "a tall ladder"),
            ("in the mud", "a strong rope"),
        )
    )
    return [
        rng.choice((f"On the way {hero.he} heard someone crying.", '"Help! Help!" called a small voice.')),
        rng.choice((f"It was a little {small} stuck {where}.", f"A {small} was {where} and could not get out.")),
        rng.choice((f'"Do not be afraid, little {small}," said {hero.name}.', f'"I will help you," said {hero.name}.')),
        rng.choice((f"{hero.subject} tried, but {hero.he} was too small.", f"But {hero.name} could not do it alone.")),
        rng.choice(
            (
                f"So {hero.he} called {friend.name} the {friend.kind}.",
                f"Then {hero.he} ran to get {friend.name} the {friend.kind}.",
            )
        ),
        rng.choice((f"{friend.name} came with {tool}.", f'"I have {tool}," said {friend.name}.')),
        rng.choice((f"Together they saved the {small}.", f"They worked hard, and soon the {small} was safe.")),
        rng.choice(
            (f"The {small} was cold, so {hero.name} put a blanket around it.", f'"Thank you both!" said the {small}.')
        ),
        rng.choice(
            (f"The {small} went home to its mother.", f"The {small} stayed with {hero.name} and became a good friend.")
        ),
        *ending(rng, hero, friend),
    ]


def plot_race(rng: random.Random, hero: Character, friend: Character, place: str) -> list[str]:
    """A race is decided by kindness."""
    return [
        rng.choice(
            (f"There was a big race at the {place} that day.", f"{hero.name} wanted to win the race at the {place}.")
        ),
        meeting(rng, hero, friend),
        rng.choice(
            (
                f'"I am faster than you," said {friend.name}.',
                f'"I will win," said {friend.name}.',
                f'"Good luck, {hero.name}!" said {friend.name}.',
            )
        ),
        rng.choice(("One, two, three, go!", "The race began.")),
        rng.choice(
            (
                f"{friend.name} ran very fast, and {hero.name} was behind.",
                f"{hero.name} ran as fast as {hero.he} could.",
            )
        ),
        rng.choice((f"Then {friend.name} fell over a stone.", f"But {friend.name} slipped and fell down.")),
        rng.choice((f"{hero.name} could win now, but {hero.he} stopped.", f"{hero.name} stopped to help.")),
        rng.choice((f'"Are you hurt?" asked {hero.name}.', f'"Take my hand," said {hero.name}.')),
        rng.choice(("They finished the race together.", "Hand in hand they came to the end of the race.")),
        rng.choice(
            (
                f'"A friend is better than a prize," said {friend.name}.',
                f"Everyone clapped for {hero.name} and {friend.name}.",
            )
        ),
        *ending(rng, hero, friend),
    ]


def plot_build(rng: random.Random, hero: Character, friend: Character, place: str) -> list[str]:
    """Something is built, breaks, and is built better."""
    thing = rng.choice(("tower", "house", "boat", "bridge", "wall", "nest"))
    stuff = rng.choice(("stones", "sticks", "sand", "wood", "boxes", "mud"))
    return [
        rng.choice(
            (
                f"{hero.subject} wanted to build {article(thing)}.",
                f'"Today I will build {article(thing)}," said {hero.name}.',
            )
        ),
        rng.choice((f"{hero.subject} looked for {stuff} all morning.", f"{hero.subject} made it from {stuff}.")),
        rng.choice(
            (f"But the wind came, and the {thing} broke.", f"But the {thing} was not strong, and it fell down.")
        ),
        rng.choice((f"{hero.name} was angry at first.", f'"Oh no, my {thing}!" said {hero.name}.')),
        meeting(rng, hero, friend),
        rng.choice((f'"Let us try again," said {friend.name}.', f'"We can do it together," said {friend.name}.')),
        rng.choice(
            (
                f"They used more {stuff} and worked slowly.",
                f"{friend.name} held the {stuff}, and {hero.name} put them in place.",
            )
        ),
        rng.choice((f"This time the {thing} was strong.", f"In the end they had the best {thing} at the {place}.")),
        rng.choice(("Two friends can do more than one.", thanks(rng, hero, friend))),
        *ending(rng, hero, friend),
    ]


def plot_gift(rng: random.Random, hero: Character, friend: Character, _place: str) -> list[str]:
    """A gift is made for someone in the family."""
    who = rng.choice(("mother", "father", "grandmother", "grandfather", "sister", "brother"))
    he, him = ("she", "her") if who in ("mother", "grandmother", "sister") else ("he", "him")
    gift = rng.choice(("card", "picture", "hat", "song", "scarf", "cake"))
    colour = rng.choice(COLOURS)
    return [
        rng.choice(
            (
                f"{hero.subject} wanted to give {hero.his} {who} a gift.",
                f"{hero.his.capitalize()} {who} was sick and stayed in bed.",
            )
        ),
        rng.choice((f"But {hero.he} had no money.", f'"What can I give {him}?" {hero.name} thought.')),
        rng.choice(
            (
                f"{hero.subject} went outside and found a {colour} flower.",
                f"{hero.subject} asked {friend.name} the {friend.kind} for help.",
                f"{hero.subject} sat down and thought for a long time.",
            )
        ),
        rng.choice((f"Then {hero.he} made a {gift}.", f"So {hero.he} worked all day and made a {gift}.")),
        rng.choice((f'"This is for you," said {hero.name}.', f"{hero.subject} gave the {gift} to {hero.his} {who}.")),
        rng.choice((f"{hero.his.capitalize()} {who} was very happy.", f'"It is beautiful!" said {hero.his} {who}.')),
        rng.choice((f"{he.capitalize()} gave {hero.name} a big hug.", f'"You made it with love," {he} said.')),
        *ending(rng, hero),
    ]


def plot_truth(rng: random.Random, hero: Character, _friend: Character, _place: str) -> list[str]:
    """Something breaks and the truth is told."""
    thing = rng.choice(("cup", "lamp", "window", "plate", "clock", "chair"))
    owner = rng.choice(("mother", "father", "grandmother", "teacher"))
    return [
        rng.choice(
            (
                f"{hero.subject} was playing with {hero.his} ball in the house.",
                f"{hero.subject} ran too fast through the house.",
            )
        ),
        rng.choice((f"Crash! The {thing} fell and broke.", f"Then the {thing} broke with a loud noise.")),
        rng.choice((f"{hero.name} was afraid.", f'"What should I do now?" thought {hero.name}.')),
        rng.choice((f"{hero.subject} wanted to hide the {thing}.", f"{hero.subject} hid {rng.choice(SPOTS)}.")),
        rng.choice((f"But then {hero.he} went to {hero.his} {owner}.", f"Soon {hero.his} {owner} came in.")),
        rng.choice(
            (
                f'"I broke the {thing}. I am sorry," said {hero.name}.',
                f'"It was me," said {hero.name}. "I am very sorry."',
            )
        ),
        rng.choice(
            (
                f"{hero.his.capitalize()} {owner} was quiet, and then smiled.",
                f"{hero.his.capitalize()} {owner} was not angry.",
            )
        ),
        rng.choice(('"Thank you for telling the truth."', '"You were brave to tell me."', '"We can fix it together."')),
        rng.choice((f"{hero.name} felt much better.", f"{hero.subject} learned that it is good to tell the truth.")),
        *ending(rng, hero),
    ]


def plot_skill(rng: random.Random, hero: Character, friend: Character, _place: str) -> list[str]:
    """A skill is learned by trying again."""
    skill = rng.choice(SKILLS)
    return [
        rng.choice(
            (
                f"{hero.subject} wanted to learn to {skill}.",
                f"{hero.name} could not {skill}, but {hero.he} wanted to learn.",
            )
        ),
        rng.choice((f"{hero.subject} tried and tried, but it did not work.", "The first time it went wrong.")),
        rng.choice((f'"I will never learn it," said {hero.name}.', f'"It is too hard for me," said {hero.name}.')),
        meeting(rng, hero, friend),
        rng.choice((f"{friend.name} knew how to {skill}.", f'"I can show you how to {skill}," said {friend.name}.')),
        rng.choice(
            (
                f'"Look at me and do the same," said {friend.name}.',
                f'"Go slowly and do not give up," said {friend.name}.',
            )
        ),
        rng.choice((f"Every day {hero.he} tried again.", f"{hero.name} tried one more time.")),
        rng.choice((f"And then {hero.he} could {skill}!", f'"Look, I can {skill}!" called {hero.name}.')),
        thanks(rng, hero, friend),
        *ending(rng, hero, friend),
    ]


def plot_treasure(rng: random.Random, hero: Character, friend: Character, place: str) -> list[str]:
    """A map leads to a box."""
    prize = rng.choice(
        ("an old book", "many gold coins", "a golden key", "a box of sweets", "a letter from a king", "a magic stone")
    )
    spot = rng.choice(SPOTS)
    return [
        rng.choice(
            (f"{hero.subject} found an old map {rng.choice(SPOTS)}.", "A bird dropped an old map from the sky.")
        ),
        rng.choice(
            (
                f"{hero.subject} showed it to {friend.name} the {friend.kind}.",
                f'"Come with me, {friend.name}!" said {hero.name} to {hero.his} friend.',
            )
        ),
        rng.choice(
            (f'"It is a treasure map," said {friend.name}.', f'"Let us find the treasure!" said {friend.name}.')
        ),
        rng.choice(
            (f"They walked through the {place} and over a bridge.", f"They went past the {place} and up a hill.")
        ),
        rng.choice(("The way was long, and their feet hurt.", "It was dark there, but they were not afraid.")),
        rng.choice((f"They dug {spot}.", f"At last they came to a place {spot}.")),
        rng.choice(("There was a big box in the ground!", "There they saw a small box.")),
        rng.choice((f"In the box was {prize}.", f"They opened it and found {prize}.")),
        rng.choice((f'"We will share it," said {hero.name}.', f'"The best treasure is a friend," said {friend.name}.')),
        *ending(rng, hero, friend),
    ]


Plot = Callable[[random.Random, Character, Character, str], list[str]]
PLOTS: tuple[Plot, ...] = (
    plot_lost,
    plot_share,
    plot_friend,
    plot_night,
    plot_garden,
    plot_baking,
    plot_rescue,
    plot_race,
    plot_build,
    plot_gift,
    plot_truth,
    plot_skill,
    plot_treasure,
)


def story_sentences(rng: random.Random, kind: str | None = None) -> list[str]:
    """Write one story as a list of sentences; ``kind`` makes the hero that kind of animal."""
    hero = make_character(rng, kind)
    friend = make_character(rng, avoid=(hero.name,))
    place = rng.choice(PLACES)
    plot = rng.choice(PLOTS)
    return [*opening(rng, hero), *setting(rng, hero, place), *plot(rng, hero, friend, place)]


def story(rng: random.Random, kind: str | None = None) -> str:
    """Write one story as text."""
    return " ".join(story_sentences(rng, kind))


SOUNDS = {
    "cat": "meow",
    "dog": "woof",
    "duck": "quack",
    "cow": "moo",
    "sheep": "baa",
    "frog": "croak",
    "owl": "whoo",
    "mouse": "squeak",
}
HOMES = {
    "fish": "in the water",
    "bird": "in a nest",
    "bear": "in the forest",
    "frog": "near the water",
    "rabbit": "in a hole in the ground",
    "cow": "on a farm",
    "fox": "in the forest",
    "bee": "in a hive",
}
OPPOSITES = {
    "big": "small",
    "hot": "cold",
    "day": "night",
    "happy": "sad",
    "fast": "slow",
    "up": "down",
    "old": "young",
    "good": "bad",
    "wet": "dry",
    "open": "closed",
}
THING_COLOURS = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "the sun": "yellow",
    "a strawberry": "red",
    "the night": "black",
    "a leaf": "green",
    "milk": "white",
}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def exchange_greeting(rng: random.Random) -> tuple[str, str]:
    """Say hello."""
    ask = rng.choice(
        ("Hello!", "Hi!", "Hello", "Hi there!", "Good morning!", "Hello, how are you?", "How are you today?")
    )
    answer = rng.choice(
        (
            "Hello! How can I help you?",
            "Hi! It is nice to meet you.",
            "Hello! I am happy to talk with you.",
            "I am fine, thank you. How are you?",
        )
    )
    return ask, answer


def exchange_identity(rng: random.Random) -> tuple[str, str]:
    """Say what the model is."""
    ask = rng.choice(("Who are you?", "What is your name?", "What are you?", "What can you do?"))
    answer = rng.choice(
        (
            "I am a very small model. I can tell stories and remember codes.",
            "I am Tandem Tiny, a very small language model.",
            "My name is Tandem Tiny. I can tell a simple story.",
        )
    )
    return ask, answer


def exchange_story(rng: random.Random) -> tuple[str, str]:
    """Tell a story about an animal or a child."""
    kind = rng.choice((*ANIMALS, "boy", "girl", None))
    if kind is None:
        return rng.choice(("Tell me a story.", "Please tell me a story.", "Can you write a short story?")), story(rng)
    ask = rng.choice(
        (
            "Tell me a story about {}.",
            "Please tell me a story about {}.",
            "Can you tell a story about {}?",
            "Write a short story about {}.",
        )
    ).format(article(kind))
    for _ in range(20):
        sentences = story_sentences(rng, kind)
        girl = any(f"{name}" in sentences[0] for name in GIRLS)
        if kind not in ("boy", "girl") or girl == (kind == "girl"):
            break
    return ask, " ".join(sentences)


def exchange_taste(rng: random.Random) -> tuple[str, str]:
    """Talk about favourite things."""
    what, words = rng.choice((("colour", COLOURS), ("animal", ANIMALS), ("food", FOODS)))
    word = rng.choice(words)
    ask = rng.choice((f"What is your favourite {what}?", f"Which {what} do you like best?"))
    answer = rng.choice(
        (
            f"My favourite {what} is {word}. What is yours?",
            f"I like {word} best.",
            f"I think {word} is the best {what}.",
        )
    )
    return ask, answer


def exchange_fact(rng: random.Random) -> tuple[str, str]:
    """Answer one of a few simple facts that a small child knows."""
    choice = rng.randrange(5)
    if choice == 0:
        animal, sound = rng.choice(tuple(SOUNDS.items()))
        return rng.choice(
            (f"What does {article(animal)} say?", f"What sound does {article(animal)} make?")
        ), f"{article(animal).capitalize()} says {sound}."
    if choice == 1:
        animal, home = rng.choice(tuple(HOMES.items()))
        return f"Where does {article(animal)} live?", f"{article(animal).capitalize()} lives {home}."
    if choice == 2:
        word, other = rng.choice(tuple(OPPOSITES.items()))
        return f"What is the opposite of {word}?", f"The opposite of {word} is {other}."
    if choice == 3:
        thing, colour = rng.choice(tuple(THING_COLOURS.items()))
        return rng.choice(
            (f"What colour is {thing}?", f"Which colour is {thing}?")
        ), f"{thing.capitalize()} is {colour}."
    if rng.random() < 0.5:
        index = rng.randrange(7)
        return f"Which day comes after {DAYS[index]}?", f"{DAYS[(index + 1) % 7]} comes after {DAYS[index]}."
    count = rng.randrange(3, 11)
    return f"Can you count to {NUMBERS[count - 1]}?", f"Yes! {', '.join(NUMBERS[:count]).capitalize()}."


def exchange_unknown(rng: random.Random) -> tuple[str, str]:
    """Admit not to know; a model this small should say so rather than guess."""
    ask = rng.choice(
        (
            "What is the capital of France?",
            "Who is the president?",
            "How does a computer work?",
            "What is the news today?",
            "Can you write a program?",
            "What is the meaning of life?",
            "Can you help me with my taxes?",
        )
    )
    return ask, rng.choice(
        ("I do not know that. I am a very small model.", "I am sorry, I do not know. I can tell you a story.")
    )


def exchange_mood(rng: random.Random) -> tuple[str, str]:
    """Answer someone's feelings."""
    return rng.choice(
        (
            ("I am sad.", "I am sorry that you are sad. Do you want to hear a story?"),
            ("I am happy today!", "That is good! Why are you so happy?"),
            ("I am tired.", "Then you should rest. Sleep well!"),
            ("I am hungry.", "You could eat some bread or an apple."),
            ("I am bored.", "Let us play a game, or I can tell you a story."),
            ("Thank you!", "You are welcome!"),
            ("Thank you very much.", "You are welcome! I like to help."),
            ("Goodbye!", "Goodbye! See you soon."),
            ("Good night.", "Good night! Sleep well."),
        )
    )


EXCHANGES: tuple[tuple[Callable[[random.Random], tuple[str, str]], int], ...] = (
    (exchange_greeting, 3),
    (exchange_identity, 2),
    (exchange_story, 8),
    (exchange_taste, 3),
    (exchange_fact, 6),
    (exchange_unknown, 2),
    (exchange_mood, 3),
)
SYSTEM_PROMPTS = (
    "You are a kind helper.",
    "You are a friendly storyteller.",
    "You are a helpful assistant.",
    "You answer in simple words.",
)


def system_prompt(rng: random.Random, chance: float = 0.2) -> list[Message]:
    """Sometimes a system message."""
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < chance else []


def dialogue(rng: random.Random) -> list[Message]:
    """Write a conversation of one to four exchanges."""
    messages = system_prompt(rng)
    makers = [maker for maker, _ in EXCHANGES]
    weights = [weight for _, weight in EXCHANGES]
    for maker in rng.choices(makers, weights, k=rng.choice((1, 1, 2, 3, 4))):
        ask, answer = maker(rng)
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    return messages


def draw_codes(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Draw distinct keys, each with a 4-digit code."""
    return [(key, f"{rng.randrange(10000):04d}") for key in rng.sample(KEYS, count)]


def recall_drill(rng: random.Random, tokens: int) -> str:
    """Write only statements, each stated several times, in about ``tokens`` tokens.

    This is the densest form of the task: about half of all digits can be copied from earlier text.  It is what
    makes the copying circuit appear early in training.
    """
    codes = draw_codes(rng, rng.randint(2, max(2, min(12, tokens // 16))))
    lines: list[str] = []
    used = 0
    while True:
        key, code = codes[len(lines)] if len(lines) < len(codes) else rng.choice(codes)
        line = KEY_ANSWER.format(key=key, code=code)
        used += estimate_tokens(line)
        if used > tokens:
            return " ".join(lines)
        lines.append(line)


def recall_task(rng: random.Random, tokens: int, codes: int, questions: int) -> RecallTask:
    """Hide ``codes`` keyed codes at random depths of a text so that text and questions take about ``tokens``."""
    pairs = draw_codes(rng, codes)
    statements = [rng.choice(KEY_STATEMENTS).format(key=key, code=code) for key, code in pairs]
    asked = [rng.choice(pairs) for _ in range(questions)]
    triples = tuple(
        (rng.choice(KEY_QUESTIONS).format(key=key), KEY_ANSWER.format(key=key, code=code), code) for key, code in asked
    )
    budget = tokens - sum(map(estimate_tokens, statements)) - sum(8 + estimate_tokens(q + a) for q, a, _ in triples)
    sentences: list[str] = []
    while budget > 0:
        for sentence in story_sentences(rng):
            budget -= estimate_tokens(sentence)
            if budget <= 0:
                break
            sentences.append(sentence)
    for statement in statements:
        sentences.insert(rng.randint(0, len(sentences)), statement)
    return RecallTask(" ".join(sentences), tuple(pairs), triples)
