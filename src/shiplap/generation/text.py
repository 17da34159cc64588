"""Text as it grows, token by token."""

from collections.abc import Sequence

from shiplap.data import Tokenizer

_UNDECODABLE = "\ufffd"


class TextStream:
    """Turns tokens into text piece by piece: the pieces put together are the text of all tokens.

    A token may end in the middle of a character, and what a token reads as may depend on its neighbours. So tokens are
    decoded together with some before them, and undecodable text at the end is held back until more tokens decide it.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        """Nothing said yet.

        Args:
            tokenizer: of the tokens.
            before: tokens that come before the text, such as the prompt; not part of it.
        """
        self._tokenizer = tokenizer
        # The tokens that are still decoded. Some of them are old: the text of those is `_shown` characters long.
        self._tokens = list(before)
        self._num_old = len(self._tokens)
        self._shown = len(tokenizer.decode(self._tokens))

    def push(self, token: int) -> str:
        """The text that one more token makes certain; often of this token, sometimes none, or that of several."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        certain = text.rstrip(_UNDECODABLE)
        new = certain[self._shown :]
        if new and certain == text:
            # The old tokens have served; what was new until now is enough to read the next ones by.
            del self._tokens[: self._num_old]
            self._num_old = len(self._tokens)
            self._shown = len(self._tokenizer.decode(self._tokens))
        else:
            self._shown += len(new)
        return new

    def end(self) -> str:
        """What was held back."""
        return self._tokenizer.decode(self._tokens)[self._shown :]
