"""The tokenizer of the embedded models: byte-level BPE with 4,096 entries, one token per digit.

A conversation is `<|begin|><|user|>q<|assistant|>a<|end|>`. Each further turn adds
`<|user|>q<|assistant|>a<|end|>`. `<|end|>` is the EOS token. The tokenizer works on bytes, so it
can encode and decode any text.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specbench_cli.training.corpus import (
    ASSISTANT,
    BEGIN,
    END,
    PAD,
    SPECIAL_TOKENS,
    USER,
    Chat,
    generate_chats,
)

VOCAB_SIZE = 4096
MAX_POSITIONS = 4096
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + message['content'] + eos_token }}"
    "{% else %}{{ '<|user|>' + message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tokenizer_texts(gsm8k: Sequence[Chat], seed: int, n_generated: int = 24_000) -> Iterator[str]:
    """Yield the texts that the tokenizer is trained on, mixed about as in the training corpus."""
    for chat in [*islice(generate_chats(seed), n_generated), *gsm8k]:
        for question, answer in chat:
            yield question
            yield answer


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Train a tokenizer on texts. Ids 0 to 4 are the `SPECIAL_TOKENS`, in their order."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        chat_template=CHAT_TEMPLATE,
    )
