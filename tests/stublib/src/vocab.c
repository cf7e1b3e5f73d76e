/* The vocabulary: the 256 bytes, then <bos> <eos> <eot> <pad>. */
#define _GNU_SOURCE
#include "stub.h"

#include <string.h>

static const char *const specials[] = {"<bos>", "<eos>", "<eot>", "<pad>"};

API int32_t llama_vocab_n_tokens(const void *vocab) { (void) vocab; return N_VOCAB; }
API int llama_vocab_type(const void *vocab) { (void) vocab; return 2; }
API bool llama_vocab_is_eog(const void *vocab, int32_t token) { (void) vocab; return token == TOKEN_EOS || token == TOKEN_EOT; }
API bool llama_vocab_is_control(const void *vocab, int32_t token) { (void) vocab; return token >= N_BYTES; }
API int32_t llama_vocab_bos(const void *vocab) { (void) vocab; return TOKEN_BOS; }
API int32_t llama_vocab_eos(const void *vocab) { (void) vocab; return TOKEN_EOS; }
API int32_t llama_vocab_eot(const void *vocab) { (void) vocab; return TOKEN_EOT; }
API bool llama_vocab_get_add_bos(const void *vocab) { (void) vocab; return true; }

API int32_t llama_tokenize(const void *vocab, const char *text, int32_t n, int32_t *out, int32_t room, bool add_special,
                           bool parse_special) {
    (void) vocab;
    int32_t made = 0;
    if (add_special && made++ < room) out[0] = TOKEN_BOS;
    for (int32_t i = 0; i < n;) {
        int32_t token = (uint8_t) text[i], length = 1;
        for (int s = 0; parse_special && s < 4; s++)
            if (n - i >= 5 && !memcmp(text + i, specials[s], 5)) token = N_BYTES + s, length = 5;
        if (made < room) out[made] = token;
        made++;
        i += length;
    }
    return made <= room ? made : -made;
}

API int32_t llama_token_to_piece(const void *vocab, int32_t token, char *out, int32_t room, int32_t lstrip, bool special) {
    (void) vocab;
    (void) lstrip;
    if (token < 0 || token >= N_VOCAB) return 0;
    if (token >= N_BYTES) {
        if (!special) return 0;
        if (room < 5) return -5;
        memcpy(out, specials[token - N_BYTES], 5);
        return 5;
    }
    if (room < 1) return -1;
    *out = (char) token;
    return 1;
}
