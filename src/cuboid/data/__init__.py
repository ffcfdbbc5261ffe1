"""From text to a rank's batches: text, tokenizer, tokens (in memory or in mapped files), samples, loader.

Only the loader's choice of rows and positions depends on the rank or the cuboid. So the same text and seed give the
same batches everywhere.
"""

from typing import TYPE_CHECKING

from cuboid.lazy import lazily

if TYPE_CHECKING:
    from cuboid.data.corpus import Corpus, build, is_built, load, open_corpus, tokenise
    from cuboid.data.faults import MAX_BAD, check_text
    from cuboid.data.ngram import ngram_bits
    from cuboid.data.order import shuffled
    from cuboid.data.samples import PADDED_TARGET, Batch, Loader, Samples
    from cuboid.data.text import code, python_stdlib, text_files
    from cuboid.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, learn_tokenizer, load_tokenizer
    from cuboid.data.tokens import Header, TokenFile, Tokens, TokenWriter, digest, is_token_file, unigram_entropy
else:
    __getattr__ = lazily(
        __name__,
        {
            "corpus": "Corpus build is_built load open_corpus tokenise",
            "faults": "MAX_BAD check_text",
            "ngram": "ngram_bits",
            "order": "shuffled",
            "samples": "PADDED_TARGET Batch Loader Samples",
            "text": "code python_stdlib text_files",
            "tokenizer": "ByteTokenizer FileTokenizer Tokenizer learn_tokenizer load_tokenizer",
            "tokens": "Header TokenFile Tokens TokenWriter digest is_token_file unigram_entropy",
        },
    )

__all__ = [
    "MAX_BAD",
    "PADDED_TARGET",
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "FileTokenizer",
    "Header",
    "Loader",
    "Samples",
    "TokenFile",
    "TokenWriter",
    "Tokenizer",
    "Tokens",
    "build",
    "check_text",
    "code",
    "digest",
    "is_built",
    "is_token_file",
    "learn_tokenizer",
    "load",
    "load_tokenizer",
    "ngram_bits",
    "open_corpus",
    "python_stdlib",
    "shuffled",
    "text_files",
    "tokenise",
    "unigram_entropy",
]
