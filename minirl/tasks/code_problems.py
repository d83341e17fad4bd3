"""A few programming problems written for minirl, so that the code task runs out of the box.

Rows as in a file of one's own (see code.py). Half are programs, half are functions. The self-check
runs every solution against its own tests and against the next problem's.
"""

from typing import Any


def _program(prompt: str, solution: str, *tests: tuple[str, str]) -> dict[str, Any]:
    rows = [{"stdin": stdin, "stdout": stdout} for stdin, stdout in tests]
    return {"prompt": prompt, "tests": rows, "solution": solution}


def _function(prompt: str, name: str, solution: str, *tests: tuple[list[Any], Any]) -> dict:
    rows = [{"call": name, "args": args, "returns": returns} for args, returns in tests]
    return {"prompt": prompt, "tests": rows, "solution": solution}


TRAIN = [
    _program(
        "A line holds two whole numbers. Print their sum.",
        "a, b = map(int, input().split())\nprint(a + b)",
        ("1 2\n", "3\n"),
        ("-5 3\n", "-2\n"),
        ("1000000000000 1\n", "1000000000001\n"),
    ),
    _function(
        "is_leap(year) says whether a year of the Gregorian calendar is a leap year.",
        "is_leap",
        "def is_leap(year):\n    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)",
        ([2024], True),
        ([1900], False),
        ([2000], True),
        ([2023], False),
    ),
    _program(
        "The first line holds n. Each of the next n lines holds a word. Print the words in reverse "
        "order, one a line.",
        "n = int(input())\nwords = [input() for _ in range(n)]\nprint('\\n'.join(words[::-1]))",
        ("3\nred\ngreen\nblue\n", "blue\ngreen\nred\n"),
        ("1\nalone\n", "alone\n"),
    ),
    _function(
        "vowels(text) counts the letters a, e, i, o and u, small or capital.",
        "vowels",
        "def vowels(text):\n    return sum(c in 'aeiou' for c in text.lower())",
        (["Education"], 5),
        (["rhythm"], 0),
        (["AEIOU aeiou"], 10),
        ([""], 0),
    ),
    _program(
        "A line holds a whole number n of at least 1. Print the numbers from 1 to n on one line "
        "with spaces between: Fizz for multiples of 3, Buzz for those of 5, FizzBuzz for both.",
        "def say(i):\n    return 'Fizz' * (i % 3 == 0) + 'Buzz' * (i % 5 == 0) or str(i)\n"
        "print(*(say(i) for i in range(1, int(input()) + 1)))",
        ("5\n", "1 2 Fizz 4 Buzz\n"),
        ("1\n", "1\n"),
        ("15\n", "1 2 Fizz 4 Buzz Fizz 7 8 Fizz Buzz 11 Fizz 13 14 FizzBuzz\n"),
    ),
    _function(
        "two_sum(numbers, target) gives the places [i, j], i < j, of the only two numbers that add "
        "up to the target.",
        "two_sum",
        "def two_sum(numbers, target):\n    seen = {}\n    for j, x in enumerate(numbers):\n"
        "        if target - x in seen:\n            return [seen[target - x], j]\n"
        "        seen[x] = j",
        ([[2, 7, 11, 15], 9], [0, 1]),
        ([[3, 2, 4], 6], [1, 2]),
        ([[-1, 8, 5, -4], 1], [2, 3]),
    ),
    _program(
        "A line holds words with spaces between. Print each different word and how often it "
        "occurs, one a line, in alphabetical order.",
        "from collections import Counter\n"
        "for word, count in sorted(Counter(input().split()).items()):\n    print(word, count)",
        ("b a b\n", "a 1\nb 2\n"),
        ("to be or not to be\n", "be 2\nnot 1\nor 1\nto 2\n"),
    ),
    _function(
        "flatten(nested) makes one flat list of a list of lists of any depth.",
        "flatten",
        "def flatten(nested):\n    flat = []\n    for item in nested:\n"
        "        flat.extend(flatten(item) if isinstance(item, list) else [item])\n    return flat",
        ([[1, [2, [3, []]], 4]], [1, 2, 3, 4]),
        ([[]], []),
        ([[[["deep"]]]], ["deep"]),
    ),
    _program(
        "The first line holds the number of rows r and of columns c, then r lines of c whole "
        "numbers follow. Print the matrix transposed.",
        "r, c = map(int, input().split())\nrows = [input().split() for _ in range(r)]\n"
        "for column in zip(*rows):\n    print(*column)",
        ("2 3\n1 2 3\n4 5 6\n", "1 4\n2 5\n3 6\n"),
        ("1 1\n7\n", "7\n"),
    ),
    _function(
        "primes(n) gives all prime numbers below n in order.",
        "primes",
        "def primes(n):\n    return [p for p in range(2, n) if all(p % d for d in "
        "range(2, int(p ** 0.5) + 1))]",
        ([10], [2, 3, 5, 7]),
        ([2], []),
        ([30], [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]),
    ),
    _program(
        "A line holds a text of round, square and curly brackets. Print yes if they are balanced, "
        "else no.",
        "pairs = {')': '(', ']': '[', '}': '{'}\nstack, ok = [], True\nfor c in input().strip():\n"
        "    if c in pairs:\n        ok = ok and bool(stack) and stack.pop() == pairs[c]\n"
        "    else:\n        stack.append(c)\nprint('yes' if ok and not stack else 'no')",
        ("([]{})\n", "yes\n"),
        ("([)]\n", "no\n"),
        ("((\n", "no\n"),
        ("}\n", "no\n"),
    ),
    _function(
        "mean(numbers) gives the arithmetic mean of a list, 0 for an empty one.",
        "mean",
        "def mean(numbers):\n    return sum(numbers) / len(numbers) if numbers else 0",
        ([[1, 2, 3, 4]], 2.5),
        ([[]], 0),
        ([[0.1, 0.2, 0.3]], 0.2),
    ),
    _program(
        "A line holds a whole number n of at least 0. Print the n-th Fibonacci number; numbers 0 "
        "and 1 are 0 and 1.",
        "a, b = 0, 1\nfor _ in range(int(input())):\n    a, b = b, a + b\nprint(a)",
        ("0\n", "0\n"),
        ("10\n", "55\n"),
        ("90\n", "2880067194370816120\n"),
    ),
    _function(
        "caesar(text, shift) shifts the letters a to z round the alphabet and leaves all else.",
        "caesar",
        "def caesar(text, shift):\n    def move(c):\n"
        "        return chr((ord(c) - 97 + shift) % 26 + 97) if 'a' <= c <= 'z' else c\n"
        "    return ''.join(map(move, text))",
        (["abc xyz!", 3], "def abc!"),
        (["hello", 26], "hello"),
        (["b", -2], "z"),
    ),
    _program(
        "Whole numbers stand on several lines, as many as there are. Print the largest and the "
        "smallest of them with a space between.",
        "import sys\nnumbers = list(map(int, sys.stdin.read().split()))\n"
        "print(max(numbers), min(numbers))",
        ("3 1\n2\n", "3 1\n"),
        ("-7\n", "-7 -7\n"),
        ("5 5 5\n9 0\n", "9 0\n"),
    ),
    _function(
        "rotate(items, k) gives the list turned to the right by k places; k may exceed its length.",
        "rotate",
        "def rotate(items, k):\n    k = k % len(items) if items else 0\n"
        "    return items[len(items) - k:] + items[:len(items) - k]",
        ([[1, 2, 3, 4, 5], 2], [4, 5, 1, 2, 3]),
        ([[1, 2], 5], [2, 1]),
        ([[], 3], []),
    ),
]

HELDOUT = [
    _program(
        "A line holds a whole number. Print the sum of its decimal digits.",
        "print(sum(int(c) for c in input() if c.isdigit()))",
        ("1234\n", "10\n"),
        ("-56\n", "11\n"),
        ("0\n", "0\n"),
    ),
    _function(
        "is_palindrome(text) says whether the letters and digits of a text, small or capital, read "
        "the same both ways.",
        "is_palindrome",
        "def is_palindrome(text):\n    kept = [c.lower() for c in text if c.isalnum()]\n"
        "    return kept == kept[::-1]",
        (["A man, a plan, a canal: Panama"], True),
        (["minirl"], False),
        ([""], True),
    ),
    _program(
        "A line holds two positive whole numbers. Print their greatest common divisor and their "
        "least common multiple with a space between.",
        "from math import gcd, lcm\na, b = map(int, input().split())\nprint(gcd(a, b), lcm(a, b))",
        ("12 18\n", "6 36\n"),
        ("7 1\n", "1 7\n"),
    ),
    _function(
        "runs(text) gives pairs [character, length] for each run of equal characters, in order.",
        "runs",
        "from itertools import groupby\ndef runs(text):\n"
        "    return [[c, len(list(group))] for c, group in groupby(text)]",
        (["aaabc"], [["a", 3], ["b", 1], ["c", 1]]),
        ([""], []),
        (["zz"], [["z", 2]]),
    ),
]
