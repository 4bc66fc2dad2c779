"""Plain English of our own making for prompts: a seeded grammar over word lists, so nothing is fetched or quoted."""

from __future__ import annotations

import random


def _options(text: str) -> list[str]:
    return [" ".join(option.split()) for option in text.split(",")]


_PEOPLE = _options(
    """the engineer,a baker,the night guard,our neighbour,the old captain,a young teacher,the gardener,
    two students,the postman,a quiet doctor,the carpenter,my cousin,the librarian,a travelling cook,
    the signal keeper,an apprentice"""
)
_KINDS = _options(
    """old,broken,heavy,silver,hidden,wooden,empty,narrow,borrowed,forgotten,painted,northern,unfinished,curious,
    enormous,fragile,distant,polished,crooked,quiet,famous,ordinary,expensive,damp,golden,rusty,ancient,second,
    temporary,official,private,mechanical,electric,foreign,seasonal,triangular,transparent,bitter,generous,modern"""
)
_NOUNS = _options(
    """bridge,letter,lighthouse,map,wheel,toolbox,garden,ledger,lamp,staircase,barn,clock,archive,road,basket,press,
    timetable,boat,report,scale,violin,telescope,window,recipe,engine,carpet,notebook,anchor,mirror,ladder,kettle,
    fence,orchard,chimney,compass,blanket,theatre,tunnel,stamp,photograph,piano,cupboard,calendar,fountain,bicycle,
    umbrella,statue,envelope,curtain,furnace,museum,hammer,pocket watch,tablecloth,greenhouse,cathedral,microscope,
    passport,cargo,diary,banner,thermometer,saddle,quarry,granary,parcel,dictionary,balcony,workshop,market stall"""
)
_VERBS = _options(
    """repaired,measured,painted,described,carried,counted,forgot,sold,admired,opened,inspected,copied,returned,
    followed,compared,cleaned,remembered,explained,borrowed,replaced,polished,delivered,photographed,weighed,insured,
    drew,buried,auctioned,translated,decorated,dismantled,mentioned,recommended,examined,praised,lost,rebuilt,
    catalogued,rented,hid,protected,moved,signed,wrapped,tested"""
)
_PLACES = _options(
    """near the river,behind the mill,in the upper room,at the market,beside the canal,on the eastern hill,
    under the arches,in the courtyard,by the station,across the square,along the coast,at the edge of the forest"""
)
_TIMES = _options(
    """before sunrise,on a rainy Tuesday,after the harvest,late in the evening,during the first frost,at noon,
    when the bells rang,three days later,in the spring of that year,once the ferry had left,towards midnight"""
)
_REASONS = _options(
    """because the council had asked for it,although nobody had expected it,so that the others could rest,
    since the price of timber had doubled,until the whole street was awake,while the children watched,
    even though the plan was still uncertain,as the instructions required,without saying a word about the cost"""
)
_ASKS = _options(
    """Summarise what happened and why it mattered.,List the people in the order in which they appear.,
    Explain which decision was the hardest.,Write the next paragraph in the same style.,
    Name three things that could have been done better.,How many objects were mentioned so far?"""
)


def text(words: int, seed: int = 0) -> str:
    """Return at least `words` words of prose; the same arguments give the same text."""
    draw = random.Random(seed)
    pick = lambda options: draw.choice(options)  # noqa: E731
    thing = lambda: f"{draw.choice(('the', 'her', 'his', 'their'))} {pick(_KINDS)} {pick(_NOUNS)}"  # noqa: E731
    paragraphs: list[str] = []
    made = 0
    while made < words:
        sentences = []
        for _ in range(draw.randint(3, 7)):
            who, what = pick(_PEOPLE), thing()
            kind = draw.randrange(5)
            if kind == 0:
                sentence = f"{pick(_TIMES)}, {who} {pick(_VERBS)} {what} {pick(_PLACES)}."
            elif kind == 1:
                sentence = f"{who} {pick(_VERBS)} {what} {pick(_PLACES)}, {pick(_REASONS)}."
            elif kind == 2:
                count = draw.randint(2, 940)
                sentence = f"{pick(_PLACES)} there were {count} visitors, and {who} {pick(_VERBS)} {what}."
            elif kind == 3:
                sentence = f"nobody {pick(_VERBS)} {what} {pick(_TIMES)}; {who} only {pick(_VERBS)} {thing()}."
            else:
                sentence = f"on page {draw.randint(1, 480)} it says that {who} {pick(_VERBS)} {what}."
            sentences.append(sentence[0].upper() + sentence[1:])
        if draw.random() < 0.3:
            sentences.append(pick(_ASKS))
        paragraph = " ".join(sentences)
        made += paragraph.count(" ") + 1
        paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)
