// A failed check ends the test program with the place and the values.
#pragma once

#include <cstdlib>
#include <iostream>

#define CHECK(condition)                                                                   \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      std::cerr << __FILE__ << ":" << __LINE__ << ": " << #condition << " is false" << std::endl; \
      std::abort();                                                                        \
    }                                                                                      \
  } while (false)

#define CHECK_EQUAL(a, b)                                                                  \
  do {                                                                                     \
    const auto value_a = (a);                                                              \
    const auto value_b = (b);                                                              \
    if (!(value_a == value_b)) {                                                           \
      std::cerr << __FILE__ << ":" << __LINE__ << ": " << #a << " is " << value_a << ", " << #b \
                << " is " << value_b << std::endl;                                         \
      std::abort();                                                                        \
    }                                                                                      \
  } while (false)

// The exception of type `Type` that `statement` throws.
#define CATCH(Type, statement)                                                             \
  [&]() -> Type {                                                                          \
    try {                                                                                  \
      statement;                                                                           \
    } catch (const Type& error) {                                                          \
      return error;                                                                        \
    }                                                                                      \
    std::cerr << __FILE__ << ":" << __LINE__ << ": " << #statement << " did not throw " << #Type \
              << std::endl;                                                                \
    std::abort();                                                                          \
  }()
