"""Target words: common English words of five letters."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

_TEXT = """
about above actor acute adapt admit adopt adult after again agent agree ahead alarm album alert alike alive allow
alone along alter among anger angle apart apple apply arena argue arise armor aroma arrow aside asset audio avoid
award aware bacon badge baker basic basin basis batch beach beard beast begin being belly below bench berry birth
black blade blame blank blast blaze blend bless blind block blood bloom board boast bonus boost booth bound brain
brake brand brass brave bread break brick bride brief bring broad brook broom brown brush build bunch burst
cabin cable camel canal candy cargo carry carve catch cause cedar chain chair chalk charm chart chase cheap check
cheek cheer chess chest chief child chill choir chord civic civil claim clash class clean clear clerk cliff climb
clock close cloth cloud clown coach coast color comet coral couch count court cover crack craft crane crash crawl
cream creek crime crisp cross crowd crown cruel crush curve cycle daily dairy dance daisy dealt debut delay dense
depth diary dirty donor doubt dozen draft drain drama dream dress drift drill drink drive eager eagle early earth
elbow elder elect empty enemy enjoy enter entry equal error event every exact exist extra fable faint fairy faith
false fancy fatal favor feast fence ferry fever fiber field fifth fight final first flame flash fleet float flock
flood floor flour fluid flute focus force forge forth found frame fresh front frost fruit funny giant given glass
globe glory glove grace grade grain grand grant grape graph grasp grass great green greet grief group grove guard
guess guest guide habit happy harsh haste heart heavy hedge honey honor horse hotel house human humor ideal image
index inner input issue ivory jewel joint judge juice knife knock label labor large laser later laugh layer learn
leave legal lemon level light limit linen liver lobby local logic loose lower loyal lucky lunch magic major maker
maple march match maybe mayor medal melon mercy metal meter might minor model money month moral motor mount mouse
mouth movie music naval nerve never night noble noise north novel nurse ocean offer often olive onion opera orbit
order organ other outer owner paint panel paper party pasta patch pause peace pearl pedal phase phone photo piano
piece pilot pitch place plain plane plant plate plaza point polar porch pound power press price pride prime print
prize proof proud pulse punch pupil queen quest quick quiet quilt quite quota radar radio rainy raise ranch range
rapid ratio reach ready realm rebel relax reply rider ridge rifle right rigid rival river roast robin robot rocky
rough round route royal rugby ruler rural salad sauce scale scarf scene scent scope score scout sense serve seven
shade shake shape share sharp sheep sheet shelf shell shift shine shirt shock shore short shout sight since skill
sleep slice slide slope small smart smile smoke snake solar solid solve sound south space spare spark speak speed
spell spend spice spike spoon sport stack staff stage stair stake stamp stand start state steam steel steep stick
still stock stone storm story stove straw strip study stuff style sugar sunny surge swamp sweet swift swing sword
table taste teach thank theme thick thing think third thumb tiger tight title toast today token tooth topic torch
total touch tough tower trace track trade trail train treat trend trial tribe trick truck trunk trust truth twist
uncle under union unity upper urban usual valid value vault venue video visit vital voice wagon waste watch water
whale wheat wheel white whole width woman world worth wound wrist write yield young youth zebra
"""
LENGTH = 5
HELD_OUT = 5
"""One word in this many belongs to held-out evaluation."""


def is_held_out(word: str) -> bool:
    """Whether a word belongs to the split `eval`; depends on the word alone."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big") % HELD_OUT == 0


@cache
def words_of(split: str) -> Sequence[str]:
    """The words of one split, in alphabetical order."""
    words = sorted({word for word in _TEXT.split() if len(word) == LENGTH})
    return tuple(word for word in words if is_held_out(word) == (split == "eval"))
