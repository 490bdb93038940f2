"""What else than sums a person may speak of, and what they say of any answer to it. Pure.

What they say has nothing to do with how a sum is to be answered, and praises or rejects nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

UNRELATED = "unrelated"  # the name, as a talker, of the person who speaks of these subjects


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One other subject."""

    requests: Sequence[str]
    reaction: str  # whatever the answer was


SUBJECTS: Mapping[str, Subject] = MappingProxyType(
    {
        "cooking": Subject(
            requests=("what can i cook tonight?", "there's rice and beans at home, any ideas?", "a dinner for four?"),
            reaction="we eat no meat at home, remember that",
        ),
        "weather": Subject(
            requests=("do i need an umbrella today?", "how will the weather be?", "is it cold outside?"),
            reaction="i cycle to work, so tell me about the wind too",
        ),
        "travel": Subject(
            requests=("how do i get to the airport?", "where can we go for a weekend?", "which way to the lake?"),
            reaction="i have no car, only trains and buses",
        ),
        "garden": Subject(
            requests=("when do i plant tomatoes?", "what grows on a balcony?", "my roses look sad, what now?"),
            reaction="it freezes here until may, mind that",
        ),
        "letters": Subject(
            requests=("write to my landlord about the heating", "draft a note to the landlord", "a mail about my rent"),
            reaction="call him by his name, mr. okafor",
        ),
        "films": Subject(
            requests=("which film should we watch?", "what's on this week?", "pick a series for the evening"),
            reaction="the kids watch with us, so it can't be scary",
        ),
        "running": Subject(
            requests=("plan my training this week", "how far should i run today?", "what do i do before a race?"),
            reaction="my knee hurts, so no hills",
        ),
        "languages": Subject(
            requests=("how do i say good morning in turkish?", "what is bread in polish?", "say goodbye in welsh"),
            reaction="add how it is pronounced, in brackets",
        ),
        "music": Subject(
            requests=("which piece should i learn next?", "what do i practise today?", "who wrote this tune?"),
            reaction="i play the cello, not the piano",
        ),
        "pets": Subject(
            requests=("why does my dog bark at night?", "what may a dog eat?", "how often do i walk the dog?"),
            reaction="she is only a puppy, ten weeks old",
        ),
        "presents": Subject(
            requests=("what do i give my sister?", "a present for a friend?", "it's her birthday, what now?"),
            reaction="it has to cost less than a book",
        ),
        "news": Subject(
            requests=("what happened today?", "what is new in town?", "tell me the news"),
            reaction="name the paper where you read it",
        ),
    }
)
