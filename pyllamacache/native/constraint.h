// What a chat template wants of a reply's tokens: a grammar from the start, or one that waits for a trigger.
#pragma once

#include "llama.h"

#include <memory>

struct sampler_deleter {
    void operator()(llama_sampler * sampler) const { llama_sampler_free(sampler); }
};

using sampler_ptr = std::unique_ptr<llama_sampler, sampler_deleter>;

// Source: common_sampler_init and common_sampler_accept of llama-common.
class Constraint {
  public:
    Constraint() = default;
    // json: the "constraint" of what plc_chat_render gives. Throws.
    Constraint(const llama_vocab * vocab, const char * json);
    // GBNF. Throws.
    static Constraint from_grammar(const llama_vocab * vocab, const char * grammar);

    explicit operator bool() const { return grammar != nullptr; }

    void apply(llama_token_data_array & candidates) const; // forbidden ones get -INFINITY
    void accept(llama_token token);

  private:
    bool applies() const;

    sampler_ptr grammar;
    sampler_ptr thinking; // NULL: no need to know whether the reply is inside its reasoning
};
