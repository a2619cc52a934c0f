# /// script
# dependencies = ["lm_eval[api]==0.4.13"]
# [tool.outrider]
# stream = "It asks for whole answers."
# tools = "It has none."
# structured = "It has none."
# ///
"""lm_eval's `local-completions`, with log-likelihoods and the server's tokenizer, over completions."""

from asked import MODEL, QUESTION, SHORT, run
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI


def default(url):
    where = {"base_url": f"{url}/v1/completions", "model": MODEL, "tokenizer_backend": "remote"}
    model = LocalCompletionsAPI(**where, num_concurrent=1, max_retries=1, max_length=2048)
    wanted = {"until": [], "max_gen_toks": SHORT, "temperature": 0}
    [said] = model.generate_until([Instance("generate_until", {}, (QUESTION, wanted), 0)], disable_tqdm=True)
    likelier = [Instance("loglikelihood", {}, (QUESTION, text), 0) for text in (said, " Xylophone")]
    (own, is_greedy), (other, is_not) = model.loglikelihood(likelier, disable_tqdm=True)
    assert is_greedy and not is_not and own / SHORT > other, (own, is_greedy, other, is_not)
    # The last request is to be the one that is asked again.
    return model.generate_until([Instance("generate_until", {}, (QUESTION, wanted), 0)], disable_tqdm=True)[0]


run(default)
