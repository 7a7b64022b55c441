r"""Whether two mathematical answers are the same.

Plain numbers are compared exactly; everything else by math-verify, in a process of its own. Its time limits rest on
signals, which only the main thread may set and which would interrupt a notebook's own; here a comparison that takes too
long ends with its process.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
import threading
import warnings
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

SECONDS = 5.0  # for one comparison
START_SECONDS = 120.0  # for the imports of the process, on a busy machine
LONGEST = 2000  # characters: no answer is longer

_SPACE = r"(?:\s|~|(?<!\\)\\[,;:! ]|\\(?:quad|qquad|thinspace)(?![a-zA-Z]))"
# Between groups of three digits: always thousands, and thousands unless it is a list.
_TIGHT = rf"(?:\{{,\}}|\\,|,\s*\\!|\\!,?)(?:\\!|{_SPACE})*"
_LOOSE = r"[, ]"
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)")
_REPEATING = re.compile(r"([+-]?\d*\.\d*)\\(?:overline|bar)\{(\d+)\}")
_FRACTION = re.compile(r"([+-]?)(?:\\frac\{([+-]?\d+)\}\{([+-]?\d+)\}|(?:(\d+) )?(\d+)/(\d+))")
_PERCENT = re.compile(r"\s*(?:\\?%|\b(?:percent|per cent|pct)\b)$")
_WRAPPED = re.compile(r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|operatorname|mbox)\s*\{([^{}]*)\}")
_POWER = r"(?:\^\{?-?\d\}?|²|³)?"
# Words that say something else about a value than its unit; so does a number among the words.
_NO_UNIT = (
    r"(?![^‹›]*\b(?:or|and|not|plus|minus|times|over|mod|squared|cubed|factorial|half|halves|thirds?|is|are|where|if|when|for|only|even|odd|"
    r"quarters?|tenths?|hundredths?|thousandths?|dozens?|pi|sqrt)\b)"
    r"(?![^‹›]*(?<![\^{a-zA-Z])\d)"
)
# Letters after a number are a unit if they are set as words, or are more than one and no product of variables; a single
# one stands apart.
_UNIT = re.compile(
    rf"(?:(?<=[a-zA-Z\d)}}])(?:[ /]*‹{_NO_UNIT}[^‹›]*›{_POWER})+|(?<=[\d)}}])(?:\s*°\s*[CF]?|"
    rf"\s*(?:cm|mm|km|ft|in|mi|kg|mg|lbs?|oz|mph|ml|hrs?|min|sec|km/h|m/s){_POWER}|\s+[mgshlL]{_POWER}|"
    rf"\s+{_NO_UNIT}[a-zA-Z]{{3,}}(?:[ /][a-zA-Z]{{2,}})*{_POWER}))$"
)
_NAMES = r"[a-zA-Z]|\([a-zA-Z](?:\s*,\s*[a-zA-Z])+\)"  # of unknowns
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALED = re.compile(rf"([^‹›a-zA-Z]+)‹?\s*({'|'.join(_SCALES)})\b\s*›?(.*)")
_UNIT_NAMES = {
    "meter": "m", "metre": "m", "centimeter": "cm", "centimetre": "cm", "kilometer": "km", "kilometre": "km",
    "millimeter": "mm", "millimetre": "mm", "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "mile": "mi",
    "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "gram": "g", "kilogram": "kg", "liter": "l",
    "litre": "l", "degree": "°", "deg": "°", "dollar": "$", "usd": "$", "square": "2", "sq": "2", "cubic": "3",
    "²": "2", "³": "3",
}  # fmt: skip


def same_mathematics(reference: str, answer: str, seconds: float = SECONDS) -> bool:
    r"""Tell whether an answer says the same as the reference.

    * Numbers are exact: 0.5 is 1/2, 0.667 is not 2/3, and nothing is right at a hundred times or a hundredth.
    * Commas and spaces between groups of three digits are thousands separators; any other comma separates two answers:
      ``1,234`` is 1234, ``1,2`` is not 12.
    * A percent sign may be left out or added where the reference is a number of percent: 20 and 0.2 are both 20 %, and
      20 % is right for 20 (above 1, percent are meant) and for 0.2 (up to 1, a share is meant).
    * An equation says what its left side is worth: ``m+n=33`` is 33, whatever was asked for.
    * A unit may be left out or added; two different units are not the same. So with the base of a number. A million is
      a number, not a unit.
    * Lists and sets have no order, pairs in parentheses have one; an open end of an interval is not a closed one;
      ``\pm 2`` is both numbers, and one of them is not enough.

    Parameters
    ----------
    reference, answer : str
        LaTeX or plain text, without the box.
    seconds : float
        How long a comparison may take; one that takes longer counts as different and warns.

    Examples
    --------
    >>> same_mathematics("1234", "1{,}234"), same_mathematics("12", "1,2")
    (True, False)
    """
    if max(len(reference), len(answer)) > LONGEST:
        return False
    pairs = [(_plain(reference), _plain(answer))]
    pairs += [(_plain(reference, commas="list"), _plain(answer, commas="list"))]  # "100,200" may be two numbers
    return any(_same(*pair, seconds) for pair in dict.fromkeys(pairs))


def _same(reference: str, answer: str, seconds: float) -> bool:
    if not reference or not answer:
        return False
    wanted, given = _read(reference), _read(answer)
    if wanted.words == given.words:
        return True
    if wanted.is_text or given.is_text:
        return False
    if any(a and b and a != b for a, b in zip(wanted.marks, given.marks, strict=True)):
        return False
    if wanted.percent or given.percent:
        return _same_percent(wanted, given)
    numbers = as_number(wanted.value), as_number(given.value)
    if None not in numbers:
        return numbers[0] == numbers[1]
    values = wanted.value, given.value
    if values[0] == values[1] or values[1] == wanted.value + wanted.unit:  # "5m", which may be a product as well
        return True
    if all("," in value for value in values) and _brackets(values[0]) != _brackets(values[1]):
        return False
    if any(re.search(r"\d\s+\d", value) for value in values):  # "1 2" is no number; a parser would multiply or add
        return False
    return _WORKER.same(*values, seconds)


def as_number(text: str) -> Fraction | None:
    r"""Return a plain decimal number or fraction, thousands separators taken out; None if the text is anything else.

    Examples
    --------
    >>> as_number("1,234.5"), as_number(r"-\frac{6}{4}"), as_number("1,2")
    (Fraction(2469, 2), Fraction(-3, 2), None)
    """
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", _plain(text))
    if _NUMBER.fullmatch(text):
        return Fraction(text)
    if found := _REPEATING.fullmatch(text):
        start, digits = found.groups()
        places = len(start.partition(".")[2])
        tail = Fraction(int(digits), (10 ** len(digits) - 1) * 10**places)
        return Fraction(f"{start}0") + (-tail if start.startswith("-") else tail)
    found = _FRACTION.fullmatch(text)
    if not found:
        return None
    top, bottom = int(found[2] or found[5]), int(found[3] or found[6])
    if not bottom:
        return None
    return (Fraction(top, bottom) + int(found[4] or 0)) * (-1 if found[1] == "-" else 1)


@dataclass(frozen=True)
class _Answer:
    """An answer taken apart.

    ``words``: the whole of it without markup, for comparison letter by letter; ``is_text``: it is set as text, so it is
    no product of variables. ``value`` and what is said about it: in percent or not, the unit, the base of the digits,
    the unknown.
    """

    words: str
    is_text: bool
    value: str = ""
    percent: bool = False
    unit: str = ""
    base: str = ""
    unknown: str = ""

    @property
    def marks(self) -> tuple[str, str, str]:
        return self.unit, self.base, self.unknown


def _plain(text: str, commas: str = "thousands") -> str:
    """Return an answer without the marks of layout that say nothing about its value.

    ``commas``: what a bare comma or space before three digits separates, outside of brackets; "thousands" or "list".
    """
    text = text.strip().replace("\u2212", "-").replace("\\$", "$").strip("$").strip()
    text = re.sub(r"^\\[(\[](.*)\\[)\]]$", r"\1", text, flags=re.DOTALL)
    text = re.sub(r"\\(?:displaystyle|textstyle|left|right|big|Big|bigg|Bigg)[lr]?(?![a-zA-Z])\s*\.?", "", text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text).replace(r"\varnothing", r"\emptyset")
    text = re.sub(r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\^\s*(?:\{\s*)?\\circ\s*\}?|\\degree(?![a-zA-Z])", "°", text)
    text = _join_thousands(text, _TIGHT)
    text = re.sub(_SPACE + "+", " ", text).replace("{,}", ",")
    if commas == "thousands" and not re.search(r"[(\[]|\\\{", text):
        text = _join_thousands(text, _LOOSE)
    text = re.sub(r"\s*,\s*", ", ", text)  # what is left separates: a parser must not join it either
    return re.sub(r"(?<!\\)\\$", "", text.strip().rstrip(".").strip()).strip()


def _join_thousands(text: str, separator: str) -> str:
    pattern = rf"(?<![\d.,])([1-9]\d{{0,2}})((?:{separator}\d{{3}})+)(?!\d|,\d|\{{,\}})"
    return re.sub(pattern, lambda found: found[1] + re.sub(r"\D", "", found[2]), text)


def _read(text: str) -> _Answer:
    """Take an answer without layout apart."""
    unwrapped = re.sub(r"\s+", " ", _WRAPPED.sub(r"\1", text)).strip().casefold()
    words = unwrapped.strip("() ") if re.fullmatch(r"\(?[a-z][\w .'-]*\)?", unwrapped) else unwrapped
    if re.fullmatch(rf"[\s()]*(?:{_WRAPPED.pattern}[\s()]*)+", text) and as_number(unwrapped) is None:
        return _Answer(words, is_text=True)
    text = _WRAPPED.sub(lambda found: f" ‹{found[1].strip()}›", text).strip()
    if (found := _SCALED.fullmatch(text)) and (number := as_number(found[1])) is not None:
        rest = found[3].strip("‹› ")
        text = f"{number * _SCALES[found[2]]}" + (f" ‹{rest}›" if rest else "")
    if found := _PERCENT.search(text.replace("‹", "").replace("›", "")):
        return _Answer(words, False, found.string[: found.start()], percent=True)
    unit = ""
    if found := _UNIT.search(text):
        unit, text = _unit_name(found[0]), text[: found.start()]
    text = re.sub(r"‹(\d+)›", r"\1", text)
    text = re.sub(r"‹([^‹›]*)›", r"\\text{ \1 }", text).strip()
    if found := re.fullmatch(r"([\dA-Z]+)_\{?(\d+)\}?", text):
        return _Answer(words, False, found[1], unit=unit, base=found[2])
    if text.count("=") == 1:
        text = re.sub(r"^([^=]*[^=a-zA-Z\s])\s*=\s*([a-zA-Z])$", r"\2=\1", text)
    unknown = re.match(rf"({_NAMES})\s*=(.*)$", text) if text.count("=") == 1 else None
    if unknown and unknown[1].startswith("("):  # a pair of names says which value is whose; the values are the answer
        text = unknown[2].strip()
    return _Answer(words, False, text, unit=unit, unknown=unknown[1].replace(" ", "") if unknown else "")


def _unit_name(words: str) -> str:
    """Return one spelling for a unit: ``meters`` is ``m``, ``square cm`` is ``cm^2``."""
    names = []
    for word in re.findall(r"[a-z]+|[\d°²³]", words.casefold()):
        single = word[:-1] if len(word) > 2 and word.endswith("s") else word
        names.append(_UNIT_NAMES.get(word, _UNIT_NAMES.get(single, single)))
    return " ".join(sorted(names))


def _same_percent(wanted: _Answer, given: _Answer) -> bool:
    reference, answer = as_number(wanted.value), as_number(given.value)
    if reference is None or answer is None:
        return wanted.percent and given.percent and wanted.value == given.value
    if wanted.percent and given.percent:
        return answer == reference
    if wanted.percent:
        return answer in (reference, reference / 100)
    return answer == reference if abs(reference) > 1 else answer / 100 == reference


def _brackets(text: str) -> str:
    """Return the brackets around a pair or an interval; braces for a set and for a bare list, which have no order."""
    text = re.sub(r"^[a-zA-Z]\s*(?:=|\\in(?![a-zA-Z]))\s*", "", text)
    closed = text[:1] in tuple("([") and text[-1:] in tuple(")]") and _is_one_group(text)
    return text[0] + text[-1] if closed else "{}"


def _is_one_group(text: str) -> bool:
    """Tell whether the first bracket closes with the last character only."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if depth == 0:
            return place == len(text) - 1
    return False


class _Worker:
    """A process that compares expressions, started when first needed and again after it had to be killed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen | None = None
        self.owner = 0

    def same(self, reference: str, answer: str, seconds: float) -> bool:
        with self.lock:
            if self.process is None or self.owner != os.getpid() or self.process.poll() is not None:
                self._start()
            try:
                self.process.stdin.write(json.dumps([reference, answer]) + "\n")
                self.process.stdin.flush()
                reply = self._read_line(seconds)
            except BaseException:  # an interrupt: what is still to come would answer the next question
                self.stop()
                raise
            if not reply:
                self.stop()
        if not reply:
            warnings.warn(
                f"comparing {answer[:60]!r} with {reference[:60]!r} took more than {seconds:g} s or too much memory; "
                "it counts as different",
                stacklevel=5,
            )
            return False
        return json.loads(reply) is True

    def stop(self) -> None:
        if self.process is not None and self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
        self.process = None

    def _start(self) -> None:
        self.stop()
        script = Path(__file__).with_name("mathematics_worker.py")
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script)],  # -P: neither the script's folder nor the current one is imported from
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the run, not for the process that grades it
        )
        self.owner = os.getpid()
        if self._read_line(START_SECONDS) != "ready\n":
            self.stop()
            raise RuntimeError(
                "the process that compares answers did not start; see above for its message, and try "
                f"{sys.executable} -P {script}"
            )

    def _read_line(self, seconds: float) -> str:
        """Return the next line of the process, "" if it had to be killed."""
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        try:
            return self.process.stdout.readline()
        finally:
            timer.cancel()


_WORKER = _Worker()
atexit.register(_WORKER.stop)
